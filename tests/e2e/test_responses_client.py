"""The Responses API by the official ``openai`` client against the default model on the CPU."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from tests.e2e.conftest import API_KEY
from tests.helpers.server import Server, running_server

pytestmark = pytest.mark.timeout(300)

MODEL = "smollm2-135m-instruct"
FRANCE = "What is the capital of France?"
BASE: dict[str, Any] = {"model": MODEL, "input": FRANCE, "max_output_tokens": 24, "temperature": 0}
LOOK_UP: Any = {
    "type": "function",
    "name": "look_up",
    "description": "Explains a word",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string", "maxLength": 12}},
        "required": ["word"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Capital(BaseModel):
    """An answer with a form."""

    known: bool


def strictly(response: Any) -> Response:
    """The response as its type says, without the client's leniency."""
    return Response.model_validate(response.to_dict(), strict=False)


def final_of(api: openai.OpenAI, **fields: Any) -> tuple[Any, list[Any]]:
    """The response at the end of a stream, and all of its events, which are numbered without a gap."""
    events: list[Any] = list(api.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events[-1].response, events


def same(streamed: Any, plain: Any) -> None:
    """But for the ids, and for what a cache remembers."""

    def known(response: Any) -> Any:
        data = response.to_dict()
        data["usage"].pop("input_tokens_details")
        items = [{**item, "id": "", "call_id": ""} for item in data["output"]]
        return {**data, "output": items, "id": "", "created_at": 0}

    assert known(streamed) == known(plain)


def test_streamed_and_plain_say_the_same(api: openai.OpenAI) -> None:
    fields = {**BASE, "metadata": {"a": "b"}, "user": "me", "store": False}
    plain = strictly(api.responses.create(**fields))
    assert "Paris" in plain.output_text
    assert (plain.object, plain.status, plain.model, plain.error) == ("response", "completed", MODEL, None)
    assert (plain.metadata, plain.user, plain.truncation, plain.temperature) == ({"a": "b"}, "me", "disabled", 0)
    (item,) = plain.output
    assert item.type == "message"
    assert item.id.startswith("msg_")
    assert item.status == "completed"
    assert plain.usage is not None
    assert plain.usage.input_tokens > 0 < plain.usage.output_tokens
    assert plain.usage.total_tokens == plain.usage.input_tokens + plain.usage.output_tokens
    assert plain.usage.output_tokens_details.reasoning_tokens == 0

    streamed, events = final_of(api, **fields)
    same(streamed, plain)
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == plain.output_text
    with api.responses.stream(**fields) as stream:
        final = stream.get_final_response()
    assert (final.output_text, final.status) == (plain.output_text, plain.status)


def test_it_is_the_same_model_as_in_chat_completions(api: openai.OpenAI) -> None:
    system = "Answer in one word."
    chat = api.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": system}, {"role": "user", "content": FRANCE}],
        max_tokens=24,
        temperature=0,
    )
    parts: Any = [{"role": "user", "content": [{"type": "input_text", "text": FRANCE}]}]
    for form in (FRANCE, parts):
        response = api.responses.create(**BASE | {"input": form, "instructions": system})
        assert response.output_text == chat.choices[0].message.content
        assert response.instructions == system
        assert response.usage is not None
        assert chat.usage is not None
        assert response.usage.input_tokens == chat.usage.prompt_tokens
        assert response.usage.output_tokens == chat.usage.completion_tokens


def test_an_answer_that_is_cut_off_is_incomplete_and_can_be_continued(api: openai.OpenAI) -> None:
    whole = api.responses.create(**BASE)
    plain = strictly(api.responses.create(**BASE | {"max_output_tokens": 3}))
    assert (plain.status, plain.output[0].status) == ("incomplete", "incomplete")  # type: ignore[union-attr]
    assert plain.incomplete_details is not None
    assert plain.incomplete_details.reason == "max_output_tokens"
    assert plain.usage is not None
    assert plain.usage.output_tokens == 3
    streamed, events = final_of(api, **BASE | {"max_output_tokens": 3})
    assert events[-1].type == "response.incomplete"
    same(streamed, plain)
    begun: Any = [{"role": "user", "content": FRANCE}, *plain.output]
    rest = api.responses.create(**BASE | {"input": begun})
    assert plain.output_text + rest.output_text == whole.output_text


def test_a_stop_string_and_the_other_ways_to_sample(api: openai.OpenAI) -> None:
    whole = api.responses.create(**BASE).output_text
    assert "apital" in whole
    cut = api.responses.create(**BASE, extra_body={"stop": ["apital"], "top_k": 5, "min_p": 0.1, "seed": 3})
    assert (cut.status, cut.output_text) == ("completed", whole.partition("apital")[0])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look_up"}])
def test_a_demanded_call_and_its_result(api: openai.OpenAI, choice: Any) -> None:
    fields = {**BASE, "tools": [LOOK_UP], "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 60}
    plain = strictly(api.responses.create(**fields))
    (call,) = plain.output
    assert call.type == "function_call"
    assert (call.name, call.status, plain.status) == ("look_up", "completed", "completed")
    assert json.loads(call.arguments).keys() == {"word"}
    assert plain.tools[0].to_dict() == LOOK_UP
    streamed, events = final_of(api, **fields)
    same(streamed, plain)
    kinds = [event.type for event in events]
    assert kinds[2] == "response.output_item.added"
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert deltas == call.arguments == events[-3].arguments
    with api.responses.stream(**fields) as stream:
        final = stream.get_final_response()
    assert final.output[0].parsed_arguments == json.loads(call.arguments)  # type: ignore[union-attr]

    turns: Any = [{"role": "user", "content": FRANCE}, *final.output]
    turns.append({"type": "function_call_output", "call_id": final.output[0].call_id, "output": "A city."})  # type: ignore[union-attr]
    after = api.responses.create(**BASE | {"input": turns, "max_output_tokens": 5}, tools=[LOOK_UP])
    assert after.usage is not None
    assert plain.usage is not None
    assert after.usage.input_tokens > plain.usage.input_tokens


def test_texts_of_a_form(api: openai.OpenAI) -> None:
    parsed = api.responses.parse(**BASE, text_format=Capital)
    assert isinstance(parsed.output_parsed, Capital)
    assert json.loads(parsed.output_text).keys() == {"known"}
    with api.responses.stream(**BASE, text_format=Capital) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    free = api.responses.create(**BASE | {"max_output_tokens": 60}, text={"format": {"type": "json_object"}})
    assert free.output_text.lstrip().startswith("{")


def test_logprobs_of_the_text(api: openai.OpenAI) -> None:
    fields = {**BASE, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    plain = strictly(api.responses.create(**fields))
    item: Any = plain.output[0]
    (part,) = item.content
    assert part.type == "output_text"
    entries = part.logprobs
    assert entries
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == plain.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    streamed, events = final_of(api, **fields)
    assert [entry.token for entry in streamed.output[0].content[0].logprobs] == [entry.token for entry in entries]
    told = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in told] == [entry.token for entry in entries[: len(told)]]
    assert len(told) >= len(entries) - 1, "all but the one that ended it"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "word " * 20_000, "stream": True}, "input"),
        ({"extra_body": {"surprise": 1}, "stream": True}, "surprise"),
    ],
)
def test_errors_are_the_clients_own_exceptions(api: openai.OpenAI, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        api.responses.create(**BASE | change)
    assert bad.value.param == param
    assert bad.value.code
    with pytest.raises(openai.NotFoundError) as missing:
        api.responses.create(**BASE | {"model": "gpt"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve("resp_1")


def test_a_stream_that_cannot_go_on_ends_with_the_error_event(impatient: Server) -> None:
    with openai.OpenAI(base_url=f"{impatient.url}/v1", api_key=API_KEY, max_retries=0, timeout=120) as api:
        endless = api.responses.create(
            **BASE | {"max_output_tokens": 100_000}, extra_body={"ignore_eos": True}, stream=True
        )
        *_, last = endless
        assert (last.type, last.code) == ("error", "timeout")


def test_the_death_of_a_detokenizer_leaves_no_gap(small: tuple[str, ...]) -> None:
    """Its successor replays many tokens at once, and has to number the events as if they had come one by one."""
    settings = ("--set", "simulated.step_ms=10", "--set", "detokenizer.workers=2")
    bodies = [{"input": f"Tell me about {seed}", "seed": seed, "max_output_tokens": 100} for seed in range(8)]

    def ask(body: dict[str, Any], has_begun: threading.Event) -> list[dict[str, Any]]:
        request = {**body, "stream": True, "ignore_eos": True}
        events = []
        with server.http.stream("POST", "/v1/responses", json=request) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line.removeprefix("data: ")))
                    if len(events) == 10:
                        has_begun.set()
        return events

    with running_server(*small, *settings) as server, ThreadPoolExecutor(len(bodies)) as clients:
        begun = [threading.Event() for _ in bodies]
        right = [events[-1]["response"]["output"] for events in clients.map(ask, bodies, begun)]
        begun = [threading.Event() for _ in bodies]
        answers = [clients.submit(ask, body, event) for body, event in zip(bodies, begun, strict=True)]
        assert all(event.wait(90) for event in begun)
        for slot in (0, 1):
            os.kill(server.pid("detokenizer", slot), signal.SIGKILL)
        for answer, expected in zip(answers, right, strict=True):
            events = answer.result(timeout=90)
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert events[-1]["type"] == "response.incomplete"
            (item,) = events[-1]["response"]["output"]
            assert item["content"] == expected[0]["content"]
            assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}
            deltas = [event["delta"] for event in events if "delta" in event]
            assert "".join(deltas) == item["content"][0]["text"]
            assert len({event["response"]["id"] for event in events if "response" in event}) == 1
