from __future__ import annotations

import json
from typing import Any

import pytest

from tokservice.protocol.anthropic_requests import CountTokensBody, MessagesBody
from tokservice.protocol.reading import Reader
from tokservice.protocol.requests import FunctionCall, Message, ToolCall
from tokservice.protocol.tools import FunctionName, NamedTool
from tokservice.tokenizer.anthropic_chat import chat_body, tokenize_body
from tokservice.wire.errors import RequestError

BODY: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "f", "description": "does", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "done"}


def chat(**fields: Any) -> Any:
    return chat_body(Reader(MessagesBody).read(json.dumps(BODY | fields).encode()))


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def test_texts_join_and_the_system_prompt_comes_first() -> None:
    hint = {"cache_control": {"type": "ephemeral"}, "citations": None}
    body = chat(system=[text("a", **hint), text("b")], messages=[{"role": "user", "content": [text("c"), text("d")]}])
    assert body.messages == [Message("system", "ab"), Message("user", "cd")]
    assert not body.continue_final_message


def test_a_system_message_stays_where_it_stands() -> None:
    """Recent clients put some among the messages, and all that they sent was a 400: vllm#44000."""
    turns = [*BODY["messages"], {"role": "system", "content": [text("be "), text("brief")]}]
    body = chat(system="a", messages=[{"role": "system", "content": "b"}, *turns])
    wanted = [Message("system", "a"), Message("system", "b"), Message("user", "hi"), Message("system", "be brief")]
    assert body.messages == wanted
    assert not body.continue_final_message


def test_calls_and_results_become_messages_of_their_own_in_order() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    turns = [
        {"role": "assistant", "content": [thought, text("so"), USE]},
        {"role": "user", "content": [RESULT, RESULT | {"is_error": True, "content": [text("x")]}, text("and?")]},
        {"role": "user", "content": [RESULT | {"content": None}]},
    ]
    call = ToolCall(FunctionCall("f", {"a": 1}), id="call_1")
    assert chat(messages=turns).messages == [
        Message("assistant", "so", tool_calls=[call], reasoning_content="hm"),
        Message("tool", "done", tool_call_id="call_1"),
        Message("tool", "Error: x", tool_call_id="call_1"),
        Message("user", "and?"),
        Message("tool", "", tool_call_id="call_1"),
    ]


def test_a_last_message_of_the_assistant_is_the_beginning_of_the_answer() -> None:
    turns = [*BODY["messages"], {"role": "assistant", "content": "well,"}]
    assert chat(messages=turns).continue_final_message
    counted = Reader(CountTokensBody).read(json.dumps({"model": "m", "messages": turns}).encode())
    assert tokenize_body(counted).continue_final_message


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, None),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, NamedTool(FunctionName("f"))),
    ],
)
def test_tool_choices(choice: Any, expected: Any) -> None:
    body = chat(tools=[TOOL], tool_choice=choice)
    assert body.tool_choice == expected
    assert body.parallel_tool_calls
    (tool,) = body.tools
    assert (tool.function.name, tool.function.description, tool.function.parameters) == (
        "f",
        "does",
        {"type": "object"},
    )


def test_tools_that_are_not_shown_are_not_counted() -> None:
    for kind, shown in (("auto", True), ("none", False)):
        data = {"model": "m", "messages": BODY["messages"], "tools": [TOOL], "tool_choice": {"type": kind}}
        body = tokenize_body(Reader(CountTokensBody).read(json.dumps(data).encode()))
        assert bool(body.tools) is shown


def test_calls_in_parallel_can_be_refused() -> None:
    assert not chat(tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True}).parallel_tool_calls


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_sequences": ["x"] * 3 + [""]}, "stop_sequences"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "messages"),
        ({"messages": [{"role": "system", "content": [RESULT]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [text("x", citations=[{"type": "page"}])]}]}, "messages"),
        ({"system": [text("x", citations=[{"type": "page"}])]}, "messages"),
        ({"container": "c"}, "container"),
        ({"model": None}, "model"),
    ],
)
def test_what_cannot_be_done_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
