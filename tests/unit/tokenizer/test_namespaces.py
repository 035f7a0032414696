from __future__ import annotations

import json
from typing import Any

import pytest

from tokservice.protocol.reading import Reader
from tokservice.protocol.requests import FunctionCall
from tokservice.protocol.responses_api_requests import ResponsesBody
from tokservice.tokenizer.namespaces import functions, namespaces
from tokservice.tokenizer.responses_api_chat import chat_body, repeated_fields
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
    told = [(tool.function.name, tool.function.description) for tool in functions(tools)]
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


@pytest.mark.parametrize("tool", [{"type": "custom", "name": "x"}, SPAWN | {"defer_loading": True}])
def test_what_is_no_function_is_refused(tool: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        functions(read(tools=[AGENTS | {"tools": [tool]}]).tools or [])
    assert (caught.value.status, caught.value.param) == (400, "tools")
