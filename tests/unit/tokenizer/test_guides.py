from __future__ import annotations

import json
from typing import Any

import llguidance
import msgspec
import pytest

from tokservice.protocol.requests import ChatBody, CompletionBody
from tokservice.tokenizer.guides import FEW_BLANKS, MAX_GUIDE_BYTES, MAX_MULTIPLE, Guide, guide_of
from tokservice.wire.errors import RequestError


def guide(**fields: Any) -> Guide | None:
    return guide_of(msgspec.json.decode(json.dumps({"prompt": "a"} | fields), type=CompletionBody))


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMA_TEXT = FEW_BLANKS + "," + json.dumps(SCHEMA)[1:]


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", FEW_BLANKS + ',"type":"object"}'),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA_TEXT),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA_TEXT),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA_TEXT),
        ({"structured_outputs": {"json_object": True}}, "json_schema", FEW_BLANKS + ',"type":"object"}'),
        ({"guided_regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"structured_outputs": {"regex": "a|b"}}, "regex", "a|b"),
        ({"guided_choice": ["yes", "nö"]}, "choice", '["yes","nö"]'),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
    ],
)
def test_guides(fields: dict[str, Any], kind: str, text: str) -> None:
    found = guide(**fields)
    assert found is not None
    assert (found.kind, found.text, found.param) == (kind, text, next(iter(fields)))


def test_gbnf_is_translated() -> None:
    found = guide(guided_grammar='root ::= "a" | digits\ndigits ::= [0-9]+')
    assert found is not None
    assert "start:" in found.text
    assert "::=" not in found.text


def test_a_json_schema_in_a_response_format() -> None:
    body = {"messages": [], "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
    found = guide_of(msgspec.json.decode(json.dumps(body), type=ChatBody))
    assert found == Guide("json_schema", SCHEMA_TEXT, "response_format")


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}, {"structured_outputs": None}]
)
def test_no_guide(fields: dict[str, Any]) -> None:
    assert guide(**fields) is None


def test_two_guides_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="exclude each other"):
        guide(guided_regex="a", response_format={"type": "json_object"})


def num_accepted(schema: Any, text: str) -> tuple[int, bool]:
    """How many of these bytes the guide lets through, and whether the output must end there."""
    found = guide(guided_json=schema)
    assert found is not None
    grammar = llguidance.LLMatcher.grammar_from_json_schema(found.text)
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    for place, byte in enumerate(text.encode()):
        if not matcher.try_consume_tokens([byte]):
            return place, matcher.is_stopped()
    return len(text), matcher.is_stopped()


@pytest.mark.parametrize("schema", [{}, {"type": "object"}, ' {"type":"object"}', SCHEMA | {"required": ["a"]}])
def test_json_has_few_blanks(schema: Any) -> None:
    """Models wrote blanks without end where the grammar let them: omlx#2990, vllm#38696, ollama#2577, sglang#8250."""
    for blanks in ("\n" * 100, " " * 100, "\n \n" * 50, "\r\n" * 50):
        assert num_accepted(schema, "{" + blanks)[0] < 100
    assert num_accepted(schema, '{"a":1}' + "\n" * 50) == (7, True)
    for indent in (None, 2, 4, "\t"):
        text = json.dumps({"a": 1}, indent=indent)
        assert num_accepted(schema, text) == (len(text), True)
    deep = json.dumps([[[[[[[[[[{"a": [1, 2]}]]]]]]]]]], indent=4)
    assert num_accepted({"type": "array"}, deep) == (len(deep), True)


def test_a_schema_may_say_of_blanks_what_it_wants() -> None:
    schema = {"x-guidance": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}}
    assert num_accepted(schema, '{"a":1}') == (7, True)
    assert num_accepted(schema, '{"a" :1}') == (4, False)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 999_983},
        {"type": "integer", "multipleOf": 20_000_003},
        {"type": "number", "multipleOf": 1234.567},
        {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]},
        {"type": "array", "items": {"$ref": "#/$defs/a", "multipleOf": 9967}, "$defs": {"a": {"multipleOf": 9973}}},
        '{"type": "integer", "multiple\\u004ff": 999983}',
        '{"type": "integer", "multipleOf": 0, "items": {"multipleOf": 999983}}',
    ],
)
def test_a_schema_that_takes_a_state_for_each_remainder_is_refused(schema: Any) -> None:
    """Forty bytes took half a minute of a worker, and gigabytes: of the kind of sglang#39125."""
    with pytest.raises(RequestError, match=r"least common multiple.*100000") as caught:
        guide(guided_json=schema)
    assert caught.value.param == "guided_json"
    if isinstance(schema, dict):
        with pytest.raises(RequestError, match="least common multiple"):
            guide(guided_grammar=f"start: %json {json.dumps(schema)}")


@pytest.mark.parametrize("number", [1, 0.01, 0.25, 15, 3600, 86_400, MAX_MULTIPLE])
def test_usual_multiples_are_accepted(number: float) -> None:
    money = {"type": "number", "multipleOf": 0.01}
    assert guide(guided_json={"properties": {"a": {"type": "number", "multipleOf": number}, "b": money}}) is not None


def test_a_large_schema_is_refused_before_it_is_compiled() -> None:
    with pytest.raises(RequestError, match=f"at most {MAX_GUIDE_BYTES} bytes"):
        guide(guided_json={"enum": ["x" * MAX_GUIDE_BYTES]})


def test_a_short_schema_of_a_huge_grammar_is_refused() -> None:
    """Ten alternatives of two each are a thousand alternatives: a second of compiling, and of the first token."""
    cross = [{"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {}}} for j in "ab"]} for i in range(10)]
    with pytest.raises(RequestError, match="too big"):
        guide(guided_json={"allOf": cross})
    assert guide(guided_json={"allOf": cross[:6]}) is not None


@pytest.mark.parametrize("grammar", ["start: start", "start: a\na: b\nb: a", "start: /[^\\s\\S]/"])
def test_a_grammar_that_no_output_can_follow_is_refused(grammar: str) -> None:
    """It is well formed, so it passed, and the engine gave the request up: a 500."""
    with pytest.raises(RequestError, match="no output can follow it") as caught:
        guide(guided_grammar=grammar)
    assert caught.value.param == "guided_grammar"


@pytest.mark.parametrize("grammar", ['start: ""', 'start: "a" <|im_end|>', "start: <[5000]>", 'start: start "a" | "a"'])
def test_a_grammar_is_not_refused_for_what_a_tokenizer_of_bytes_lacks(grammar: str) -> None:
    assert guide(guided_grammar=grammar) == Guide("grammar", grammar, "guided_grammar")


def test_raw_parts_of_a_body_may_hold_anything() -> None:
    """Raw fields are not decoded with the body: invalid UTF-8 in one got past the reader."""
    for raw in (b'{"a":"\xff"}', b'"\xff"'):
        body = msgspec.json.decode(b'{"prompt":"a","guided_json":' + raw + b"}", type=CompletionBody)
        with pytest.raises(RequestError, match="guided_json"):
            guide_of(body)


def test_deep_schemas_in_strings_are_refused() -> None:
    """The guard before the parser sees the body alone: a schema in a string is behind it."""
    with pytest.raises(RequestError, match="nested more than"):
        guide(guided_json='{"a":' + "[" * 5000 + "]" * 5000 + "}")
