from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tokservice.protocol.requests import ChatBody, CompletionBody
from tokservice.tokenizer.guides import ANY_OBJECT, MAX_GUIDE_BYTES, Guide, guide_of
from tokservice.wire.errors import RequestError


def guide(**fields: Any) -> Guide | None:
    return guide_of(msgspec.json.decode(json.dumps({"prompt": "a"} | fields), type=CompletionBody))


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", ANY_OBJECT),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, "json_schema", ANY_OBJECT),
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
    assert found == Guide("json_schema", json.dumps(SCHEMA), "response_format")


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}, {"structured_outputs": None}]
)
def test_no_guide(fields: dict[str, Any]) -> None:
    assert guide(**fields) is None


def test_two_guides_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="exclude each other"):
        guide(guided_regex="a", response_format={"type": "json_object"})


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
