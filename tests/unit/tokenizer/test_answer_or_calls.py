"""A schema for the answer does not keep the model from its tools: vllm#39929, vllm#16313."""

from __future__ import annotations

import llguidance
import pytest

from tests.helpers.preparers import CHAT, TOOL, prepared
from tokservice.protocol import context as contexts
from tokservice.tokenizer.answer_or_calls import answer_or_calls
from tokservice.tokenizer.guides import FEW_BLANKS, Guide
from tokservice.tokenizer.prepare import Preparer
from tokservice.tokenizer.tool_use import MAX_TOOLS, ToolUse

SCHEMA = '{\n"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
ANSWER = Guide("json_schema", SCHEMA, "response_format")
CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "f", "arguments": {"b": [1]}}\n</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
    ),
    "llama3_json": (
        '{"name": "f", "parameters": {"b": "c"}}',
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
    ),
    "mistral": (
        '[TOOL_CALLS][{"name": "f", "arguments": {"b": 1}}]',
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
    ),
}


def follows(guide: Guide, text: str) -> bool:
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(guide.text), log_level=0
    )
    return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()


@pytest.mark.parametrize("tool_format", CALLS)
def test_the_answer_or_calls_instead(tool_format: str) -> None:
    one, two = CALLS[tool_format]
    tools = ToolUse(format=tool_format, names=("f", "g"))
    guide = answer_or_calls(ANSWER, tools, lambda _: None)
    assert (guide.kind, guide.param) == ("grammar", "response_format")
    assert all(follows(guide, text) for text in ('{"a": 1}', one, two))
    assert not any(follows(guide, text) for text in ("so", '{"a": "b"}', one.replace('"f"', '"h"'), '{"a": 1}' + one))
    alone = answer_or_calls(ANSWER, tools._replace(parallel=False), lambda _: None)
    assert follows(alone, one)
    assert not follows(alone, two)


@pytest.mark.parametrize("tool_format", CALLS)
def test_an_answer_that_begins_like_a_call(tool_format: str) -> None:
    schema = '{"type":"object","properties":{"name":{"type":"string"},"b":{}},"required":["name"]}'
    guide = Guide("json_schema", f"{FEW_BLANKS},{schema[1:]}", "response_format")
    guide = answer_or_calls(guide, ToolUse(format=tool_format, names=("f", "g")), lambda _: None)
    answers = ('{"name": "Ada"}', '{"name":"f"}', '{\n  "name": "f",\n  "b": []\n}')
    assert all(follows(guide, text) for text in (*answers, *CALLS[tool_format]))


def test_as_many_tools_with_as_long_names_as_there_can_be() -> None:
    names = tuple(f"{place:0128}" for place in range(MAX_TOOLS))
    for tool_format in CALLS:
        assert answer_or_calls(ANSWER, ToolUse(format=tool_format, names=names), lambda _: None).kind == "grammar"


def test_marks_that_are_tokens_are_named_by_their_ids() -> None:
    """As text they would come in pieces, which the model would not choose."""
    guide = answer_or_calls(ANSWER, ToolUse(format="hermes", names=("f",)), {"<tool_call>": 7, "</tool_call>": 8}.get)
    assert "<[7]>" in guide.text
    assert "<[8]>" in guide.text
    assert "tool_call" not in guide.text


def test_without_tools_or_a_schema_a_guide_is_what_it_was() -> None:
    assert answer_or_calls(ANSWER, ToolUse(), lambda _: None) == ANSWER
    regex = Guide("regex", "a", "guided_regex")
    assert answer_or_calls(regex, ToolUse(format="hermes", names=("f",)), lambda _: None) == regex


def test_requests_get_it(preparer: Preparer) -> None:
    body = CHAT | {"tools": [TOOL], "response_format": {"type": "json_object"}}
    result = prepared(preparer, **body, truncate_prompt_tokens=50)
    assert result.sampling.guide_kind == "grammar"
    assert contexts.decode(result.context).tool_format == "hermes"
    assert prepared(preparer, **body, tool_choice="none").sampling.guide_kind == "json_schema"
