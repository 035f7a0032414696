from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tokservice.protocol.requests import ChatBody
from tokservice.tokenizer.tool_use import ToolUse, format_of, tool_use
from tokservice.wire.errors import RequestError

WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "$defs": {"City": {"type": "string"}},
    },
}
NOW = {"name": "now"}


def use(*functions: dict[str, Any], own_format: str = "hermes", **fields: Any) -> ToolUse:
    tools = [{"type": "function", "function": function} for function in functions]
    return tool_use(
        msgspec.json.decode(json.dumps({"messages": [], "tools": tools} | fields), type=ChatBody), own_format
    )


def test_a_free_answer_is_read_in_the_models_own_format() -> None:
    found = use(WEATHER, NOW, own_format="mistral", parallel_tool_calls=False)
    assert (found.format, found.names, found.parallel, found.guide) == (
        "mistral",
        ("get_weather", "now"),
        False,
        None,
    )
    assert found.shown is not None
    assert found.shown[0]["function"] == WEATHER
    assert found.shown[1]["function"] == NOW | {"parameters": {"type": "object", "properties": {}}}


def test_without_a_use_tools_are_not_shown() -> None:
    assert use(WEATHER, tool_choice="none") == use() == use(tool_choice="auto") == ToolUse()


def test_a_demanded_call_is_guided_and_definitions_move_to_the_root() -> None:
    found = use(WEATHER, NOW, tool_choice="required")
    assert found.format == "json_list"
    assert found.guide is not None
    schema = json.loads(found.guide.text)
    assert schema["$defs"] == {"City": {"type": "string"}}
    names = [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]]
    assert names == ["get_weather", "now"]
    assert "maxItems" not in schema
    alone = use(WEATHER, tool_choice="required", parallel_tool_calls=False).guide
    assert alone is not None
    assert json.loads(alone.text)["maxItems"] == 1


def test_a_named_call_is_guided_by_its_parameters() -> None:
    found = use(WEATHER, NOW, tool_choice={"type": "function", "function": {"name": "get_weather"}})
    assert (found.format, found.names) == ("named", ("get_weather",))
    assert found.guide is not None
    assert json.loads(found.guide.text)["properties"] == WEATHER["parameters"]["properties"]  # type: ignore[index]


def test_definitions_that_differ_are_refused() -> None:
    other = {"name": "other", "parameters": {"type": "object", "$defs": {"City": {"type": "integer"}}}}
    with pytest.raises(RequestError, match="by the same name"):
        use(WEATHER, other, tool_choice="required")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ('{"name": function name, "parameters": dictionary}<|python_tag|>', "llama3_json"),
        ("{{ messages }}", "hermes"),
        ("", "hermes"),
    ],
)
def test_the_template_tells_the_format(source: str, expected: str) -> None:
    assert format_of(source) == expected
