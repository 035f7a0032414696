"""The official ``anthropic`` client against the default model on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.e2e.conftest import API_KEY
from tests.helpers.server import Server
from tests.helpers.wait import wait_for

pytestmark = pytest.mark.timeout(300)

MODEL = "smollm2-135m-instruct"
FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "messages": FRANCE, "temperature": 0}
BASE: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "messages": FRANCE, "extra_body": {"temperature": 0}}
LOOK_UP: Any = {
    "name": "look_up",
    "description": "Explains a word",
    "input_schema": {
        "type": "object",
        "properties": {"word": {"type": "string", "maxLength": 12}},
        "required": ["word"],
        "additionalProperties": False,
    },
}


def client_of(server: Server, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=120)


@pytest.fixture
def api(default_model: Server) -> Iterator[anthropic.Anthropic]:
    with client_of(default_model) as client:
        yield client


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_streamed_and_plain_say_the_same(api: anthropic.Anthropic) -> None:
    plain = api.messages.create(**BASE)
    assert "Paris" in text_of(plain)
    assert (plain.type, plain.role, plain.model, plain.stop_sequence) == ("message", "assistant", MODEL, None)
    assert plain.stop_reason in ("end_turn", "max_tokens")
    kinds = [event.type for event in api.messages.create(**BASE, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"], "the client drops pings"
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    with api.messages.stream(**BASE) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(final) == text_of(plain)
    assert (final.stop_reason, final.stop_sequence) == (plain.stop_reason, plain.stop_sequence)
    for usage in (plain.usage, final.usage):
        assert (
            usage.input_tokens + (usage.cache_read_input_tokens or 0)
            == api.messages.count_tokens(model=MODEL, messages=FRANCE).input_tokens
        )
        assert usage.output_tokens == plain.usage.output_tokens


def test_it_is_the_same_model_as_in_chat_completions(api: anthropic.Anthropic, default_model: Server) -> None:
    system = "Answer in one word."
    messages = [{"role": "system", "content": system}, *FRANCE]
    body = {"messages": messages, "max_tokens": 24, "temperature": 0}
    chat = default_model.http.post("/v1/chat/completions", json=body).json()
    blocks: Any = [{"type": "text", "text": "Answer in ", "cache_control": {"type": "ephemeral"}}]
    blocks.append({"type": "text", "text": "one word."})
    for form in (system, blocks):
        message = api.messages.create(**BASE, system=form)
        assert text_of(message) == chat["choices"][0]["message"]["content"]
        assert message.usage.output_tokens == chat["usage"]["completion_tokens"]


def test_a_stop_sequence_cuts_exactly_and_is_named(api: anthropic.Anthropic) -> None:
    whole = text_of(api.messages.create(**BASE))
    for stream in (False, True):
        if stream:
            with api.messages.stream(**BASE, stop_sequences=["never", "apital"]) as events:
                message: Any = events.get_final_message()
        else:
            message = api.messages.create(**BASE, stop_sequences=["never", "apital"])
        assert text_of(message) == whole.partition("apital")[0]
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "apital")


def test_a_begun_answer_is_continued(api: anthropic.Anthropic) -> None:
    begun: Any = [*FRANCE, {"role": "assistant", "content": "The capital of France is"}]
    assert text_of(api.messages.create(**BASE | {"messages": begun})).startswith(" Paris")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look_up"}])
def test_a_demanded_call_and_its_result(api: anthropic.Anthropic, choice: Any) -> None:
    options: Any = {**BASE, "tools": [LOOK_UP], "max_tokens": 60}
    options["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
    plain = api.messages.create(**options)
    assert plain.stop_reason == "tool_use"
    (call,) = plain.content
    assert call.type == "tool_use"
    assert call.name == "look_up"
    assert isinstance(call.input, dict)
    assert call.input.keys() == {"word"}
    with api.messages.stream(**options) as stream:
        final = stream.get_final_message()
    (streamed,) = final.content
    assert streamed.type == "tool_use"
    assert (streamed.name, streamed.input, final.stop_reason) == ("look_up", call.input, "tool_use")

    result = {"type": "tool_result", "tool_use_id": call.id, "content": "A city.", "is_error": False}
    turns: Any = [
        *FRANCE,
        {"role": "assistant", "content": plain.content},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    after = api.messages.create(**BASE | {"messages": turns, "max_tokens": 5}, tools=[LOOK_UP])
    counted = api.messages.count_tokens(model=MODEL, messages=turns, tools=[LOOK_UP])
    assert after.usage.input_tokens + (after.usage.cache_read_input_tokens or 0) == counted.input_tokens


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"surprise": 1}, "surprise"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1000}}, "budget_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "thinking"),
        ({"tools": [LOOK_UP], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
    ],
)
def test_bad_input_is_named_in_the_envelope(default_model: Server, change: dict[str, Any], named: str) -> None:
    answer = default_model.http.post("/v1/messages", json=BODY | change)
    assert answer.status_code == 400
    body = answer.json()
    assert body.keys() == {"type", "error"}
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert named in body["error"]["message"]


def test_errors_have_the_clients_own_types(api: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        api.messages.create(**BASE | {"model": "claude"})
    assert unknown.value.body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": str(_message(unknown))},
    }
    with pytest.raises(anthropic.BadRequestError):
        api.messages.create(**BASE | {"messages": [{"role": "user", "content": "word " * 20_000}]})
    with pytest.raises(anthropic.BadRequestError):
        api.messages.create(**BASE | {"max_tokens": "many"}, stream=True)


def _message(caught: Any) -> str:
    return str(caught.value.body["error"]["message"])


def test_the_key_comes_in_the_clients_own_header(impatient: Server) -> None:
    with client_of(impatient, "wrong") as client, pytest.raises(anthropic.AuthenticationError):
        client.messages.create(**BASE)
    with client_of(impatient, API_KEY) as client:
        assert client.messages.create(**BASE | {"max_tokens": 3}).usage.output_tokens <= 3


def test_a_stream_that_cannot_go_on_ends_with_the_error_event(impatient: Server) -> None:
    body = {**BODY, "max_tokens": 100_000, "stream": True, "stop_sequences": ["\x00\x01"]}
    *_, last, end = impatient.http.post("/v1/messages", json=body, headers={"x-api-key": API_KEY}).text.split("\n\n")
    assert end == ""
    kind, data = last.split("\n")
    assert kind == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "timeout_error"
    wait_for(lambda: impatient.gauge("num_requests_running") == 0, what="idle")
