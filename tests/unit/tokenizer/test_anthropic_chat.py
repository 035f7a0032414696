from __future__ import annotations

import json
from typing import Any

import pytest

from tokservice.protocol.anthropic_requests import CountTokensBody, MessagesBody
from tokservice.protocol.reading import Reader
from tokservice.protocol.requests import FunctionCall, Message, ToolCall
from tokservice.protocol.tools import ToolDemand, ToolName
from tokservice.tokenizer.anthropic_chat import applied_edits, chat_body, in_own_words, omits_thoughts, tokenize_body
from tokservice.tokenizer.guides import Guide, guide_of
from tokservice.tokenizer.traits import Traits
from tokservice.wire.errors import RequestError

BODY: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "f", "description": "does", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}}
JSON = {"type": "json_schema", "schema": {"type": "object"}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "done"}


PLAIN = Traits()
THINKING = Traits(frozenset({"messages", "enable_thinking", "reasoning_effort"}), tells_thoughts=True)


def read(**fields: Any) -> MessagesBody:
    return Reader(MessagesBody).read(json.dumps(BODY | fields).encode())


def chat(traits: Traits = PLAIN, **fields: Any) -> Any:
    return chat_body(read(**fields), traits)


def tokenize(traits: Traits = PLAIN, **fields: Any) -> Any:
    body = {key: value for key, value in BODY.items() if key != "max_tokens"} | fields
    return tokenize_body(Reader(CountTokensBody).read(json.dumps(body).encode()), traits)


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
    assert tokenize(messages=turns).continue_final_message


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, None),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, ToolDemand(ToolName("f"))),
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
        assert bool(tokenize(tools=[TOOL], tool_choice={"type": kind}).tools) is shown


def test_calls_in_parallel_can_be_refused() -> None:
    assert not chat(tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True}).parallel_tool_calls


def test_the_line_that_counts_requests_is_no_part_of_the_prompt() -> None:
    """It differs in each request of Claude Code, so that no prefix was ever found in the cache: vllm#36829."""
    line = "x-anthropic-billing-header: cc_version=2.1; cch=1f3a9;"
    for system in ([text(line), text("be"), text(" brief")], f"{line}\nbe brief"):
        assert chat(system=system).messages[0] == Message("system", "be brief")
    for system in ([text(line)], line):
        assert chat(system=system).messages == [Message("user", "hi")]
    quoted = [{"role": "user", "content": line}]
    assert chat(messages=quoted).messages == [Message("user", line)]


@pytest.mark.parametrize(
    ("thinking", "variables", "omitted"),
    [
        (None, {}, False),
        ({"type": "adaptive"}, {"enable_thinking": True}, False),
        ({"type": "adaptive", "display": "omitted"}, {"enable_thinking": True}, True),
        ({"type": "enabled", "budget_tokens": 1024, "display": "summarized"}, {"enable_thinking": True}, False),
        ({"type": "disabled"}, {"enable_thinking": False}, False),
    ],
)
def test_thinking_is_a_variable_of_the_template(thinking: Any, variables: Any, omitted: bool) -> None:
    """Every request of Claude Code says "adaptive", and each was a 400."""
    body = read(thinking=thinking)
    assert chat_body(body, THINKING).chat_template_kwargs == variables
    assert chat_body(body, PLAIN).chat_template_kwargs == {}
    assert omits_thoughts(body) is omitted
    assert tokenize(THINKING, thinking=thinking).chat_template_kwargs == variables


def test_thoughts_are_not_turned_on_where_they_would_be_text() -> None:
    silent = Traits(frozenset({"thinking"}), tells_thoughts=False)
    assert chat(silent, thinking={"type": "adaptive"}).chat_template_kwargs == {}
    assert chat(silent, thinking={"type": "disabled"}).chat_template_kwargs == {"thinking": False}


def test_there_are_no_thoughts_where_a_schema_binds_the_answer() -> None:
    asked: dict[str, Any] = {"thinking": {"type": "adaptive"}, "output_config": {"format": JSON}}
    assert chat(THINKING, **asked).chat_template_kwargs == {"enable_thinking": False}
    assert tokenize(THINKING, **asked).chat_template_kwargs == {"enable_thinking": False}


def test_the_effort_is_a_hint() -> None:
    asked: dict[str, Any] = {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}
    assert chat(THINKING, **asked).chat_template_kwargs == {"reasoning_effort": "high", "enable_thinking": False}
    assert chat(**asked).chat_template_kwargs == {}
    assert chat(THINKING, output_config={}).chat_template_kwargs == {}


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_an_output_format_is_a_guide(field: str) -> None:
    def guide(schema: Any) -> Guide | None:
        asked = {"type": "json_schema", "schema": schema}
        fields: dict[str, Any] = {field: {"format": asked} if field == "output_config" else asked}
        return guide_of(chat(**fields))

    schema = {"type": "object", "title": "é"}
    found = guide(schema)
    assert found is not None
    assert found.kind == "json_schema"
    assert json.loads(found.text).items() >= schema.items()
    with pytest.raises(RequestError) as caught:
        guide(5)
    assert "'output_config'" in in_own_words(caught.value).message


def test_edits_of_the_context_are_taken_and_none_is_made() -> None:
    """Claude Code asks for them in each request."""
    edits = [
        {"type": "clear_thinking_20251015", "keep": "all"},
        {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 9}, "exclude_tools": ["f"]},
    ]
    assert applied_edits(read(context_management={"edits": edits})) == {"context_management": {"applied_edits": []}}
    assert applied_edits(read(context_management=None)) == applied_edits(read()) == {}


def test_what_other_servers_answers_hold_can_be_sent_back() -> None:
    use = USE | {"caller": {"type": "direct"}, "toolset_name": None}
    turns = [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "Eu8="}, text("so"), use]}]
    call = ToolCall(FunctionCall("f", {"a": 1}), id="call_1")
    assert chat(messages=turns).messages == [Message("assistant", "so", tool_calls=[call])]


def test_examples_of_a_tools_input_are_in_its_schema() -> None:
    (tool,) = chat(tools=[TOOL | {"type": "custom", "strict": True, "input_examples": [{"a": 1}]}]).tools
    assert tool.function.parameters == {"type": "object", "examples": [{"a": 1}]}
    assert tool.function.strict


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
        ({"messages": [{"role": "assistant", "content": [USE | {"caller": {"type": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [RESULT | {"toolset_name": "x"}]}]}, "messages"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools"),
        ({"tools": [TOOL | {"allowed_callers": ["code_execution_20250825"]}]}, "tools"),
        ({"thinking": {"type": "between_tools"}}, "thinking"),
        ({"thinking": {"type": "adaptive", "display": "updates"}}, "thinking"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "budget_tokens"),
        ({"output_config": {"effort": "extreme"}}, "output_config"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 5}}}, "output_config"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        ({"output_config": {"format": JSON}, "output_format": JSON}, "output_format"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url", "url": "x", "name": "x"}]}, "mcp_servers"),
        ({"inference_geo": "us"}, "inference_geo"),
        ({"speed": "fast"}, "speed"),
        ({"diagnostics": {"previous_message_id": None}}, "diagnostics"),
        ({"model": None}, "model"),
    ],
)
def test_what_cannot_be_done_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
