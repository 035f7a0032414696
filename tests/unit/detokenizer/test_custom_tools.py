"""Calls of custom tools, whose input is a text."""

from __future__ import annotations

import json

import pytest

from tests.helpers.contexts import context
from tokservice.detokenizer.message_parser import message_parser
from tokservice.protocol import context as contexts
from tokservice.protocol.parts import Kind, Part

NAMES, CUSTOM = ("patch", "add"), ("patch",)
TEXT = '*** Begin\n+ "é😀\u2028" \\d {}\t\x00'


def parse(text: str, tool_format: str = "hermes", size: int = 1) -> list[tuple[Kind, int, str]]:
    """The parts of a text that comes ``size`` characters at a time, joined where one goes on."""
    made = context(tool_format=tool_format, tool_names=NAMES, custom_tools=CUSTOM)
    parser = message_parser(contexts.decode(made))
    assert parser is not None
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    joined: list[tuple[Kind, int, str]] = []
    for part in [part for piece in pieces for part in parser.push(piece)] + parser.flush():
        if joined and joined[-1][:2] == (part.kind, part.call):
            joined[-1] = (part.kind, part.call, joined[-1][2] + part.text)
        else:
            joined.append((part.kind, part.call, part.text))
    return joined


def called(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "patch", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (json.dumps({"input": TEXT}), TEXT),
        (json.dumps({"input": TEXT}, ensure_ascii=False), TEXT),
        (json.dumps({"input": TEXT}, indent=2), TEXT),
        ('{ "input" :\n"a" , "more": "b"}', "a"),
        ('{"input": "two\nlines"}', "two\nlines"),
        (r'{"input": "\d \u12 \ud800 \udc00\ud83d"}', "\\d \\u12 \ufffd \ufffd\ufffd"),
        (r'{"input": "\ud83d\ud83d\ude00\u0041"}', "\ufffd😀A"),
        ('{"input": ""}', ""),
        ("{}", ""),
        ("{ }", ""),
        ("null", ""),
        (json.dumps(TEXT), TEXT),
        (json.dumps('{"input": "a"}'), "a"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": ["a"]}', '{"input": ["a"]}'),
        ('{"in put": "a"}', '{"in put": "a"}'),
    ],
)
def test_the_input_is_what_the_argument_says(arguments: str, expected: str, size: int) -> None:
    texts = [(Kind.INPUT, 0, expected)] if expected else []
    assert parse(called(arguments), size=size) == [(Kind.CUSTOM_CALL, 0, "patch"), *texts]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_functions_keep_their_json_beside_custom_tools(size: int) -> None:
    first, second = called('{"input": "a"}'), '<tool_call>{"name": "add", "arguments": {"input": "b"}}</tool_call>'
    assert parse(f"So:{first}{second}{first}", size=size) == [
        (Kind.CONTENT, 0, "So:"),
        (Kind.CUSTOM_CALL, 0, "patch"),
        (Kind.INPUT, 0, "a"),
        (Kind.CALL, 1, "add"),
        (Kind.ARGUMENTS, 1, '{"input": "b"}'),
        (Kind.CUSTOM_CALL, 2, "patch"),
        (Kind.INPUT, 2, "a"),
    ]


@pytest.mark.parametrize("size", [1, 1000])
def test_demanded_calls(size: int) -> None:
    arguments = '{"input": "a\\nb"}'
    expected = [(Kind.CUSTOM_CALL, 0, "patch"), (Kind.INPUT, 0, "a\nb")]
    assert parse(f'[{{"name": "patch", "arguments": {arguments}}}]', "json_list", size) == expected
    assert parse(arguments, "named", size) == expected
    assert parse("a\nb", "input", size) == expected, "guided by the tool's grammar"


def test_the_input_is_passed_on_as_it_comes() -> None:
    parser = message_parser(contexts.decode(context(tool_format="named", tool_names=NAMES, custom_tools=CUSTOM)))
    assert parser is not None
    assert parser.push('{"inp') == [Part(Kind.CUSTOM_CALL, "patch")]
    assert parser.push('ut": "a') == [Part(Kind.INPUT, "a")]
    assert parser.push("\\") == []
    assert parser.push("nb") == [Part(Kind.INPUT, "\nb")]
    assert parser.push("\\ud83d") == []
    assert parser.push("\\ude00") == [Part(Kind.INPUT, "😀")]
    assert parser.push('"}') == parser.flush() == []


@pytest.mark.parametrize("cut", ["{", '{"inp', '{"input": "', '{"input": "\\', '{"input": "\\ud83d\\u'])
def test_what_breaks_off_before_it_says_anything_says_nothing(cut: str) -> None:
    assert parse(cut, "named") == [(Kind.CUSTOM_CALL, 0, "patch")]
