from __future__ import annotations

import json
from typing import Any

import llguidance
import msgspec
import pytest

from tokservice.protocol.requests import ChatBody
from tokservice.tokenizer.guides import Guide
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
LARK = {"type": "grammar", "grammar": {"definition": 'start: "a"+', "syntax": "lark"}}
REGEX = {"type": "grammar", "grammar": {"definition": "a|b", "syntax": "regex"}}


def use(*functions: dict[str, Any], own_format: str = "hermes", **fields: Any) -> ToolUse:
    """Of functions, and of custom tools, which have a format."""
    kinds = ["custom" if "format" in function else "function" for function in functions]
    tools = [{"type": kind, kind: function} for kind, function in zip(kinds, functions, strict=True)]
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


@pytest.mark.parametrize(
    "parameters", [None, {}, {"type": "object"}, {"type": "object", "additionalProperties": False}]
)
def test_a_tool_without_arguments_has_properties_that_a_template_can_go_through(parameters: Any) -> None:
    """Clients leave them out (langchain-mcp-adapters#137), and templates as that of Seed-OSS refused the request."""
    shown = use(NOW | {"parameters": parameters}).shown
    assert shown is not None
    assert shown[0]["function"]["parameters"] == {"type": "object", "properties": {}} | (parameters or {})


def test_without_a_use_tools_are_not_shown() -> None:
    assert use(WEATHER, tool_choice="none") == use() == use(tool_choice="auto") == ToolUse()


def test_a_demanded_call_is_guided() -> None:
    found = use(WEATHER, NOW, tool_choice="required")
    assert found.format == "json_list"
    assert found.guide is not None
    schema = json.loads(found.guide.text)
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


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    """Codex offers one, and each of its requests was a 400."""
    found = use(WEATHER, {"name": "patch", "description": "edits", "format": LARK})
    assert (found.names, found.custom, found.format, found.guide) == (
        ("get_weather", "patch"),
        ("patch",),
        "hermes",
        None,
    )
    assert found.shown is not None
    shown = found.shown[1]["function"]
    assert (shown["name"], shown["description"], shown["parameters"]["required"]) == ("patch", "edits", ["input"])
    text = shown["parameters"]["properties"]["input"]
    assert text["type"] == "string"
    assert 'start: "a"+' in text["description"], "the model cannot know the grammar otherwise"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ("named", "json_schema")),
        ({"type": "text"}, ("named", "json_schema")),
        (LARK, ("input", "grammar")),
        (REGEX, ("input", "regex")),
    ],
)
def test_a_custom_tool_that_is_named_is_guided_by_its_grammar(text: Any, expected: tuple[str, str]) -> None:
    found = use(NOW, {"name": "c", "format": text}, tool_choice={"type": "custom", "custom": {"name": "c"}})
    assert found.guide is not None
    assert ((found.format, found.guide.kind), found.names, found.custom) == (expected, ("c",), ("c",))


def test_a_regex_binds_any_demanded_call() -> None:
    found = use(NOW, {"name": "c", "format": REGEX}, tool_choice="required").guide
    assert found is not None
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_json_schema(found.text)
    )
    call = b'[{"name": "c", "arguments": {"input": "'
    assert matcher.try_consume_tokens(list(call + b"b")) == len(call) + 1
    assert matcher.try_consume_tokens(list(b"b")) == 0


def allowed(mode: str, *names: str, kind: str = "function") -> dict[str, Any]:
    tools = [{"type": kind, kind: {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_only_allowed_tools_are_known() -> None:
    custom = {"name": "c", "format": None}
    assert use(WEATHER, NOW, custom, tool_choice=allowed("auto", "now", "now")) == use(NOW)
    assert use(WEATHER, custom, tool_choice=allowed("auto", "c", kind="custom")) == use(custom)
    both = use(WEATHER, NOW, tool_choice=allowed("auto", "now", "get_weather"))
    assert both == use(WEATHER, NOW), "in the order of the tools: the prefix cache finds the prompt"
    assert use(WEATHER, NOW, tool_choice=allowed("required", "now")) == use(NOW, tool_choice="required")
    assert use(WEATHER, tool_choice=allowed("auto")) == ToolUse()


@pytest.mark.parametrize(
    "choice",
    [
        allowed("required"),
        allowed("auto", "c"),
        allowed("auto", "now", kind="custom"),
        {"type": "custom", "custom": {"name": "now"}},
        {"type": "custom", "function": {"name": "now"}},
        {"type": "allowed_tools"},
        {"type": "function"},
        {"function": {"name": "now"}, "custom": {"name": "now"}},
        {**allowed("auto", "now"), "function": {"name": "now"}},
    ],
)
def test_a_choice_of_what_is_not_there_is_refused(choice: Any) -> None:
    with pytest.raises(RequestError) as caught:
        use(NOW, tool_choice=choice)
    assert (caught.value.status, caught.value.param) == (400, "tool_choice")


def follows(guide: Guide | None, text: str) -> bool:
    """Whether an output can be this text."""
    assert guide is not None
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_json_schema(guide.text)
    )
    return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()


def call(name: str, arguments: str) -> str:
    return f'[{{"name": "{name}", "arguments": {arguments}}}]'


def test_references_stay_within_their_tool() -> None:
    """Definitions of two tools by the same name were refused."""
    schema = {"properties": {"city": {"$ref": "#/$defs/City"}, "more": {"$ref": "#"}}, "required": ["city"], "$id": "x"}
    other = {"name": "other", "parameters": schema | {"$defs": {"City": {"type": "integer"}}}}
    guide = use(WEATHER, other, tool_choice="required").guide
    assert follows(guide, call("get_weather", '{"city": "Rome"}'))
    assert follows(guide, call("other", '{"city": 1, "more": {"city": 2}}'))
    assert not follows(guide, call("other", '{"city": "Rome"}'))


@pytest.mark.parametrize(
    "odd",
    [
        {"not": {"type": "string"}},
        {"type": "array", "uniqueItems": True},
        {"type": "string", "format": "file-path"},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "string", "pattern": "^(?!a)b"},
        {"type": "any"},
        {"$ref": "https://example.org/schema.json"},
    ],
)
def test_a_schema_that_cannot_bind_leaves_the_other_tools_alone(odd: dict[str, Any]) -> None:
    """One keyword that grammars do not know broke every demanded call: vllm#16880, of the kind of llama.cpp#25923."""
    parameters = {"type": "object", "properties": {"a": odd}, "required": ["a"]}
    tool = {"name": "odd", "parameters": parameters}
    guide = use(WEATHER, tool, tool_choice="required").guide
    assert follows(guide, call("get_weather", '{"city": "Rome"}'))
    assert not follows(guide, call("get_weather", '{"city": 1}'))
    assert any(follows(guide, call("odd", f'{{"a": {value}}}')) for value in ('"b"', '["b"]', "1"))
    named = {"type": "function", "function": {"name": "odd"}}
    assert use(WEATHER, tool, tool_choice=named).guide is not None
    for choice in ("required", named):
        with pytest.raises(RequestError) as caught:
            use(WEATHER, tool | {"strict": True}, tool_choice=choice)
        assert caught.value.param == "tools"


def test_schemas_that_are_too_large_together_leave_the_tools_alone() -> None:
    """As agents send them, with pages of descriptions; one that is strict still binds."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "description": "x" * 20_000}}}
    large = [{"name": name, "parameters": parameters} for name in "fg"]
    strict = {"name": "h", "strict": True, "parameters": {"properties": {"a": {"type": "integer"}}}}
    found = use(*large, strict, tool_choice="required")
    assert found.guide
    calls = [call["properties"] for call in json.loads(found.guide.text)["items"]["anyOf"]]
    assert [call["name"]["const"] for call in calls] == ["f", "g", "h"]
    assert [call["arguments"].get("properties") for call in calls] == [None, None, {"a": {"type": "integer"}}]
    with pytest.raises(RequestError, match="at most 32768 bytes"):
        use(*(function | {"strict": True} for function in large), tool_choice="required")


def test_the_time_to_check_many_schemas_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they have no grammar, and each of them takes long."""
    monkeypatch.setattr("tokservice.tokenizer.tool_use.MAX_CHECK_S", 0.1)
    number = {"type": "integer", "multipleOf": 49999}
    odd = [{"name": f"f{place}", "parameters": {"properties": {"a": number}}} for place in range(3)]
    other = {"name": "g", "parameters": {"properties": {"a": {"type": "integer", "multipleOf": 7}}}}
    with pytest.raises(RequestError, match="takes more than") as caught:
        use(*odd, other, tool_choice="required")
    assert caught.value.param == "tools"
    assert use(NOW, tool_choice="required").guide  # the limit is over


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
