"""``/v1/chat/completions`` as the ``openai`` client uses it: logprobs, tools, response formats."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.helpers.server import Server

pytestmark = pytest.mark.timeout(300)

QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


def test_logprobs_have_the_bytes_of_the_content(api: openai.OpenAI, model: str) -> None:
    """Entries of byte fragments showed U+FFFD with its own bytes: ollama#13497."""
    emoji: Any = {"guided_choice": ["naïve 😀 日本"]}
    answer = api.chat.completions.create(
        model=model, messages=QUESTION, logprobs=True, top_logprobs=2, max_tokens=30, extra_body=emoji
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    data = bytes(byte for entry in choice.logprobs.content for byte in entry.bytes or ())
    assert data.decode() == choice.message.content == "naïve 😀 日本"
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert answer.usage is not None
    assert len(choice.logprobs.content) == answer.usage.completion_tokens


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_demanded_call_follows_its_schema(api: openai.OpenAI, model: str, choice: Any) -> None:
    options: Any = {"model": model, "messages": QUESTION, "tools": [WEATHER], "tool_choice": choice, "temperature": 0}
    answer = api.chat.completions.create(**options, max_tokens=60, parallel_tool_calls=False).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}


def test_a_free_call_streamed_and_plain(api: openai.OpenAI, model: str) -> None:
    options: Any = {"model": model, "messages": QUESTION, "tools": [WEATHER], "max_tokens": 60}
    options["extra_body"] = {"guided_choice": [CALL]}
    plain = api.chat.completions.create(**options).choices[0]
    assert plain.finish_reason == "tool_calls"
    (call,) = plain.message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": "Paris"}

    with api.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.content is None
    (streamed,) = final.message.tool_calls or []
    assert (streamed.function.name, streamed.function.arguments) == ("get_weather", call.function.arguments)

    turn: Any = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    after = api.chat.completions.create(
        model=model, messages=[*QUESTION, turn, result], tools=[WEATHER], max_tokens=5, temperature=0
    )
    assert after.usage is not None
    assert after.usage.completion_tokens <= 5


def test_response_formats(api: openai.OpenAI, model: str) -> None:
    schema: Any = {
        "type": "json_schema",
        "json_schema": {
            "name": "pair",
            "strict": True,
            "schema": {
                "type": "object",
                "properties": {"even": {"type": "boolean"}, "digit": {"enum": [1, 2, 3]}},
                "required": ["even", "digit"],
                "additionalProperties": False,
            },
        },
    }
    answer = api.chat.completions.create(
        model=model, messages=QUESTION, response_format=schema, max_tokens=60, temperature=0
    )
    assert set(json.loads(answer.choices[0].message.content or "")) == {"even", "digit"}
    api.chat.completions.create(model=model, messages=QUESTION, response_format={"type": "text"}, max_tokens=1)
    with pytest.raises(openai.BadRequestError) as bad:
        api.chat.completions.create(model=model, messages=QUESTION, response_format={"type": "xml"})  # type: ignore[call-overload]
    assert bad.value.param == "response_format"


def test_thoughts_are_split_off_by_option(thinking: Server) -> None:
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0, timeout=120) as api:
        options: Any = {"model": api.models.list().data[0].id, "messages": QUESTION, "max_tokens": 40}
        options["extra_body"] = {"guided_choice": ["<think>\nhm, hm\n</think>\n\nSunny."]}
        message = api.chat.completions.create(**options).choices[0].message
        assert (message.content, message.model_dump()["reasoning_content"]) == ("Sunny.", "hm, hm\n")
        deltas = [chunk.choices[0].delta for chunk in api.chat.completions.create(**options, stream=True)]
        assert "".join(delta.content or "" for delta in deltas) == "Sunny."
        assert "".join(delta.model_dump().get("reasoning_content") or "" for delta in deltas) == "hm, hm\n"
