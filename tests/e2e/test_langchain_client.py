"""``langchain-openai`` against the default model: chat, streams, tools, structured output, plain texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import ChatGeneration
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

from tests.helpers.server import Server

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("loopback_only")]

MODEL = "smollm2-135m-instruct"
FRANCE = "What is the capital of France?"


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    is_big: bool


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@pytest.fixture
def options(default_model: Server) -> Iterator[dict[str, Any]]:
    """Of every client. Its threads share connections, of which none may stay idle: as in tests/helpers/server.py."""
    with httpx.Client(timeout=120, trust_env=False, headers={"connection": "close"}) as http:
        base: dict[str, Any] = {"model": MODEL, "base_url": f"{default_model.url}/v1", "api_key": "none"}
        yield base | {"max_retries": 0, "temperature": 0, "max_tokens": 24, "http_client": http}


@pytest.fixture
def chat(options: dict[str, Any]) -> ChatOpenAI:
    return ChatOpenAI(**options)


def joined(chunks: list[Any]) -> AIMessageChunk:
    """The library's own joining."""
    whole: AIMessageChunk = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    return whole


def test_chat_streamed_and_plain_say_the_same(chat: ChatOpenAI) -> None:
    plain = chat.invoke(FRANCE)
    chunks = list(chat.stream(FRANCE, stream_usage=True))
    whole = joined(chunks)
    assert "Paris" in plain.text
    assert whole.text == plain.text
    assert len([chunk for chunk in chunks if chunk.text]) > 1
    assert whole.response_metadata["finish_reason"] == plain.response_metadata["finish_reason"]
    for key in ("input_tokens", "output_tokens", "total_tokens"):
        used: Any = plain.usage_metadata
        assert dict(whole.usage_metadata or {})[key] == used[key] > 0


def test_several_questions_at_once(chat: ChatOpenAI) -> None:
    alone = [chat.invoke(text).text for text in (FRANCE, "Count: one, two,")]
    assert [answer.text for answer in chat.batch([FRANCE, "Count: one, two,"])] == alone


def test_logprobs_and_choices(options: dict[str, Any]) -> None:
    client = ChatOpenAI(**options | {"temperature": 1, "logprobs": True, "top_logprobs": 2, "n": 2, "seed": 1})
    (generations,) = client.generate([[HumanMessage(FRANCE)]]).generations
    assert len(generations) == 2
    for generation in generations:
        assert isinstance(generation, ChatGeneration)
        entries: Any = generation.message.response_metadata["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == generation.text
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


@pytest.mark.parametrize("choice", ["any", "get_weather"])
def test_a_demanded_call_and_its_result(chat: ChatOpenAI, choice: str) -> None:
    with_tools = chat.bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False, strict=True)
    question = [SystemMessage("Use your tools."), HumanMessage("What is the weather in Paris?")]
    plain = with_tools.invoke(question, max_tokens=60)
    (call,) = plain.tool_calls
    assert (call["name"], set(call["args"])) == ("get_weather", {"city"})
    (streamed,) = joined(list(with_tools.stream(question, max_tokens=60))).tool_calls
    assert (streamed["name"], streamed["args"]) == (call["name"], call["args"])

    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    after = chat.bind_tools([get_weather]).invoke([*question, plain, result])
    assert after.response_metadata["finish_reason"] in ("stop", "length")
    assert after.usage_metadata is not None
    assert plain.usage_metadata is not None
    assert after.usage_metadata["input_tokens"] > plain.usage_metadata["input_tokens"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_follows_the_schema(chat: ChatOpenAI, method: Any) -> None:
    asked = chat.with_structured_output(City, method=method, include_raw=True)
    answer = asked.invoke("Paris is a big city.", max_tokens=60)
    assert isinstance(answer, dict)
    assert answer["parsing_error"] is None
    assert isinstance(answer["parsed"], City)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the openai client's types know no parsed object
def test_structured_output_streamed(chat: ChatOpenAI) -> None:
    *_, last = chat.with_structured_output(City, method="json_schema").stream("Paris is a big city.", max_tokens=60)
    assert isinstance(last, City)


def test_json_mode(chat: ChatOpenAI) -> None:
    asked = chat.with_structured_output(None, method="json_mode")
    answer = asked.invoke('Answer with the JSON object {"city": "Paris"} alone.', max_tokens=60)
    assert isinstance(answer, dict)


def test_texts_streamed_and_plain_say_the_same(options: dict[str, Any]) -> None:
    client = OpenAI(**options)
    plain = client.invoke("Once upon a time")
    assert plain
    pieces = list(client.stream("Once upon a time"))
    assert "".join(pieces) == plain
    assert len(pieces) > 1
    several = client.generate(["Once upon a time", "One, two,"])
    assert several.generations[0][0].text == plain
