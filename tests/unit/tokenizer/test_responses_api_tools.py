from __future__ import annotations

import json
from typing import Any

import pytest

from tokservice.protocol.reading import Reader
from tokservice.protocol.requests import CustomCall, FunctionCall
from tokservice.protocol.responses_api_requests import ResponsesBody
from tokservice.protocol.tools import AllowedTools, AnyText, Grammar, GrammarText, NamedTool, ToolDemand, ToolName
from tokservice.tokenizer.responses_api_chat import chat_body, repeated_fields
from tokservice.tokenizer.responses_api_tools import namespaces, plain_tools, tool_choice
from tokservice.tokenizer.sampling import GenerationDefaults
from tokservice.tokenizer.traits import Traits
from tokservice.wire.errors import RequestError

OBJECT = {"type": "object"}
SPAWN = {"type": "function", "name": "spawn", "description": "starts one", "parameters": OBJECT, "strict": False}
LIST = {"type": "function", "name": "list", "description": None, "parameters": None, "strict": None}
AGENTS = {"type": "namespace", "name": "agents", "description": "other agents", "tools": [SPAWN, LIST]}


def read(**fields: Any) -> ResponsesBody:
    return Reader(ResponsesBody).read(json.dumps({"input": "hi", "tools": [SPAWN, AGENTS]} | fields).encode())


def test_functions_of_a_namespace_have_whole_names() -> None:
    """Codex offers some in every request, and each was a 400."""
    tools = read().tools or []
    told = [tool.function and (tool.function.name, tool.function.description) for tool in plain_tools(tools)]
    assert told == [
        ("spawn", "starts one"),
        ("agents__spawn", "other agents\n\nstarts one"),
        ("agents__list", None),
    ]
    assert namespaces(tools) == {"agents__spawn": "agents", "agents__list": "agents"}


def test_earlier_calls_have_them_too() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "spawn", "namespace": "agents", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "done", "namespace": "agents"}
    _, asked, _ = chat_body(read(input=[{"role": "user", "content": "hi"}, call, output]), Traits()).messages
    assert [tool.function for tool in asked.tool_calls or []] == [FunctionCall("agents__spawn", "{}")]


def test_the_answer_repeats_them_as_they_were() -> None:
    assert json.loads(repeated_fields(read(), GenerationDefaults()))["tools"] == [SPAWN, AGENTS]


def test_custom_tools() -> None:
    about = {"type": "custom", "name": "patch", "description": "edits"}
    texts: list[Any] = [None, {"type": "text"}, {"type": "grammar", "definition": "a", "syntax": "regex"}]
    tools = [about | {"name": f"patch{place}", "format": text} for place, text in enumerate(texts)]
    body = read(tools=[*tools, AGENTS | {"tools": [about]}])
    custom = [tool.custom for tool in plain_tools(body.tools or []) if tool.custom]
    names = ["patch0", "patch1", "patch2", "agents__patch"]
    assert [tool.name for tool in custom] == names
    assert [tool.format for tool in custom] == [None, AnyText(), GrammarText(Grammar("a", "regex")), None]
    assert namespaces(body.tools or []) == {"agents__patch": "agents"}
    told = json.loads(repeated_fields(body, GenerationDefaults()))["tools"]
    assert told == [*tools, AGENTS | {"tools": [about | {"format": None}]}]


def test_earlier_calls_of_custom_tools() -> None:
    call = {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c", "name": "patch", "input": "+ a", "async": True}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}
    items = [{"role": "user", "content": "hi"}, call, call | {"namespace": "agents", "status": "completed"}, output]
    _, asked, result = chat_body(read(input=items), Traits()).messages
    assert [tool.custom for tool in asked.tool_calls or []] == [
        CustomCall("patch", "+ a"),
        CustomCall("agents__patch", "+ a"),
    ]
    assert (result.role, result.content, result.tool_call_id) == ("tool", "done", "c")


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", "auto"),
        ({"type": "function", "name": "spawn"}, ToolDemand(ToolName("spawn"))),
        ({"type": "function", "name": "list"}, ToolDemand(ToolName("agents__list"))),
        ({"type": "function", "name": "agents__spawn"}, ToolDemand(ToolName("agents__spawn"))),
        ({"type": "custom", "name": "patch"}, ToolDemand(custom=ToolName("patch"), type="custom")),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "list"}, {"type": "custom", "name": "patch"}],
            },
            ToolDemand(
                allowed_tools=AllowedTools(
                    "required",
                    [NamedTool(ToolName("agents__list")), NamedTool(custom=ToolName("patch"), type="custom")],
                ),
                type="allowed_tools",
            ),
        ),
    ],
)
def test_choices(choice: Any, expected: Any) -> None:
    """A request may say the name that a tool has within its namespace."""
    body = read(tool_choice=choice)
    assert tool_choice(body.tool_choice, body.tools or []) == expected
    assert json.loads(repeated_fields(body, GenerationDefaults()))["tool_choice"] == choice


CUSTOM = {"type": "custom", "name": "x"}


@pytest.mark.parametrize(
    "tool",
    [
        CUSTOM | {"defer_loading": True},
        CUSTOM | {"async": True},
        SPAWN | {"async": True},
        SPAWN | {"defer_loading": True},
    ],
)
def test_what_is_not_done_is_refused(tool: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        plain_tools(read(tools=[AGENTS | {"tools": [tool]}]).tools or [])
    assert (caught.value.status, caught.value.param) == (400, "tools")
    assert f"'{list(tool)[-1]}'" in caught.value.message
