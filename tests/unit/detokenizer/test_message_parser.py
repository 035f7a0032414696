from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.helpers.contexts import context
from tokservice.detokenizer.message_parser import message_parser
from tokservice.detokenizer.tool_parsers.call_object import MAX_NAME_CHARS, CallObject
from tokservice.protocol import context as contexts
from tokservice.protocol.parts import Kind, Part
from tokservice.wire.errors import WireError

NAMES = ("get_weather", "add")
PARIS = '{"city": "Paris", "days": [1, {"a": "}]\\""}]}'

Message = tuple[str, str, list[tuple[str, str]]]


def parse(text: str, tool_format: str = "", reasoning: str = "", size: int = 1, **fields: Any) -> Message:
    """Thoughts, content and calls of a text that comes ``size`` characters at a time."""
    made = context(tool_format=tool_format, tool_names=NAMES, reasoning=reasoning, **fields)
    parser = message_parser(contexts.decode(made))
    assert parser is not None
    parts: list[Part] = []
    for start in range(0, len(text), size):
        parts += parser.push(text[start : start + size])
    return joined(parts + parser.flush())


def joined(parts: list[Part]) -> Message:
    thoughts = content = ""
    calls: list[tuple[str, str]] = []
    for part in parts:
        match part.kind:
            case Kind.REASONING:
                thoughts += part.text
            case Kind.CONTENT:
                content += part.text
            case Kind.CALL | Kind.CUSTOM_CALL:
                assert part.call == len(calls)
                calls.append((part.text, ""))
            case Kind.ARGUMENTS | Kind.INPUT:
                calls[part.call] = (calls[part.call][0], calls[part.call][1] + part.text)
    return thoughts, content, calls


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("tool_format", "text", "content", "calls"),
    [
        ("hermes", "just text", "just text", []),
        ("hermes", " \n", " \n", []),
        ("hermes", hermes("add", "{}"), "", [("add", "{}")]),
        ("hermes", "I look.\n" + hermes("get_weather", PARIS), "I look.\n", [("get_weather", PARIS)]),
        (
            "hermes",
            hermes("add", '{"a": 1}') + "\n" + hermes("add", '{"a": 2}') + "\n",
            "",
            [("add", '{"a": 1}'), ("add", '{"a": 2}')],
        ),
        ("hermes", hermes("add", "{}") + " Done. <b", " Done. <b", [("add", "{}")]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [("add", '{"a": 1}')]),
        ("hermes", r'<tool_call>{"name": "\ud800", "arguments": "\udfff\ud83d\ude00"}', "", [("\ufffd", "\ufffd😀")]),
        ("hermes", '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
        ("hermes", '<tool_call>{"arguments": null, "name": "add"}</tool_call>', "", [("add", "{}")]),
        ("hermes", '<tool_call>{"name": "add", "arguments": null, "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "add", "arguments": nil}</tool_call>', "", [("add", "nil")]),
        ("hermes", '<tool_call>{"name": "add", "parameters": {"a": 1}, "arguments": {}}', "", [("add", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "add", "id": 7, "arguments": {"a', "", [("add", '{"a')]),
        (
            "hermes",
            '<tool_call>\n[{"name": "add", "arguments": {"a": 1}}, {"name": "add"}]\n</tool_call> x',
            " x",
            [("add", '{"a": 1}'), ("add", "{}")],
        ),
        ("hermes", hermes("add", '{"a": "b\n\\d\\\n\\n\t"}'), "", [("add", r'{"a": "b\n\\d\\\n\n\t"}')]),
        ("hermes", hermes("add", '"{\\"a\\": \\"b\n\\"}"'), "", [("add", r'{"a": "b\n"}')]),
        ("hermes", "<tool_call>nonsense</tool_call> x", "<tool_call>nonsense</tool_call> x", []),
        ("hermes", '<tool_call>{"nam', '<tool_call>{"nam', []),
        ("hermes", '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
        ("hermes", "<tool_call>" + hermes("add", "{}"), "<tool_call>", [("add", "{}")]),
        ("hermes", "a < b and <tool_ca", "a < b and <tool_ca", []),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1} oops', " oops", [("add", '{"a": 1}')]),
        ("hermes", hermes("add", '{"a": 1}').replace("}}", "}") + " x", " x", [("add", '{"a": 1}')]),
        ("hermes", hermes("add", '{"a": 1}').replace("}}", "}}}") + " x", " x", [("add", '{"a": 1}')]),
        ("hermes", hermes("add", '{"a": 1}').replace("}}\n</tool_call>", "}}} x"), "} x", [("add", '{"a": 1}')]),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
        (
            "llama3_json",
            '{"name": "add", "parameters": {"a": 1}}; {"name": "get_weather", "parameters": {}}',
            "",
            [("add", '{"a": 1}'), ("get_weather", "{}")],
        ),
        (
            "llama3_json",  # the second one came as content: vllm#49923
            '{"name": "add", "parameters": {"a": 1}}\n{"name": "get_weather", "parameters": {}}\n',
            "",
            [("add", '{"a": 1}'), ("get_weather", "{}")],
        ),
        ("llama3_json", '{"name": "add", "parameters": {}}\n{"a": 1}', '\n{"a": 1}', [("add", "{}")]),
        (
            "hermes",
            hermes("add", '{"a": 1}').replace("}}", '}}\n{"name": "get_weather"}') + " x",
            " x",
            [("add", '{"a": 1}'), ("get_weather", "{}")],
        ),
        ("hermes", hermes("add", "{}") + '\n{"name": "add"}', '\n{"name": "add"}', [("add", "{}")]),
        ("llama3_json", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
        ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
        ("llama3_json", 'See {"name": "add", "parameters": {}}', 'See {"name": "add", "parameters": {}}', []),
        ("llama3_json", '{"name": "add", "parameters": {}}; ok', "; ok", [("add", "{}")]),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": {}}]',
            "",
            [("add", '{"a": 1}'), ("get_weather", "{}")],
        ),
        ("mistral", 'Wait.[TOOL_CALLS][{"name": "add", "arguments": {}}]', "Wait.", [("add", "{}")]),
        (
            "mistral",
            f'[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]add{{"a": 1}}',
            "",
            [("get_weather", PARIS), ("add", '{"a": 1}')],
        ),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]abc123[ARGS]{"a": 1}', "", [("add", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a":\n"b\n"}', "", [("add", '{"a":\n"b\\n"}')]),
        ("mistral", "[TOOL_CALLS] are written so", "[TOOL_CALLS] are written so", []),
        ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
        ("mistral", "[1] x [TOOL", "[1] x [TOOL", []),
        (
            "json_list",
            '[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]',
            "",
            [("add", '{"a": 1}'), ("add", "{}")],
        ),
        ("json_list", '[{"name": "add", "arguments": {"a": 1}}, {"name": "add', "", [("add", '{"a": 1}')]),
        ("json_list", '[{"name": "add", "arguments": {"a": 1}}, ', "", [("add", '{"a": 1}')]),
        ("json_list", '[{"nam', "", []),
        ("json_list", "no list", "no list", []),
        ("named", '{"city": "Paris"}', "", [("get_weather", '{"city": "Paris"}')]),
    ],
)
def test_tool_calls(tool_format: str, text: str, content: str, calls: list[tuple[str, str]], size: int) -> None:
    """For arguments that are null clients were sent the text "null", which they take for no object: langchain#33896.
    Half of a surrogate pair, which no UTF-8 holds, ended the worker. Line ends and backslashes that the model had not
    escaped could not be read as JSON: kimi-cli#1378, hermes-agent#110436. Of a list only the first call was one.
    Where a brace was missing or one too many, the closing mark was text: of the kind of hermes-agent#5315.
    """
    assert parse(text, tool_format, size=size) == ("", content, calls)


@pytest.mark.parametrize("size", [1, 2, 1000])
@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r"C:\users\u12", r"C:\users\u12"),
        (r"\u\u00e9\u00", "\\ué\\u00"),
        (r"\u1\n", "\\u1\n"),
        ("\\u\n", "\\u\n"),
        (r"\\u", r"\u"),
        (r"\ud83d\ude00\u00e", "😀\\u00e"),
    ],
)
def test_a_backslash_before_a_u_that_is_no_code_stands_for_itself(written: str, value: str, size: int) -> None:
    for tool_format, mark in (("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]")):
        text = f'{mark}{{"name": "add", "arguments": {{"a": "{written}"}}}}'
        _, content, calls = parse(text, tool_format, size=size)
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [("add", {"a": value})]
        assert content == ""


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = message_parser(contexts.decode(context(tool_format="hermes", tool_names=NAMES)))
    assert parser is not None
    assert parser.push('<tool_call>\n{"name": "add", "arguments": {"a": ') == [
        Part(Kind.CALL, "add"),
        Part(Kind.ARGUMENTS, '{"a": '),
    ]
    assert parser.push("1") == [Part(Kind.ARGUMENTS, "1")]


def test_only_the_first_call_where_calls_in_parallel_are_not_wanted() -> None:
    text = hermes("add", '{"a": 1}') + hermes("add", '{"a": 2}')
    assert parse(text, "hermes", parallel_tool_calls=False) == ("", "", [("add", '{"a": 1}')])


@pytest.mark.parametrize("size", [1, 2, 1000])
@pytest.mark.parametrize(
    ("reasoning", "text", "thoughts", "content"),
    [
        ("tagged", "<think>\nhm\n</think>\n\nYes.", "hm\n", "Yes."),
        ("tagged", "\n<think>hm</think>Yes.", "hm", "Yes."),
        ("tagged", "Yes. <think>no</think>", "", "Yes. <think>no</think>"),
        ("tagged", "<thin", "", "<thin"),
        ("tagged", "<think>never ends </th", "never ends </th", ""),
        ("open", "hm</think>\nYes.", "hm", "Yes."),
        ("open", "\nhm", "hm", ""),
        ("inside", " so </think>\n\nYes.", " so ", "Yes."),
        ("tagged", "", "", ""),
    ],
)
def test_thoughts(reasoning: str, text: str, thoughts: str, content: str, size: int) -> None:
    assert parse(text, reasoning=reasoning, size=size) == (thoughts, content, [])


def test_thoughts_come_before_tool_calls() -> None:
    text = "<think>I could <tool_call></think>\n" + hermes("add", json.dumps({"a": 1}))
    assert parse(text, "hermes", "tagged") == ("I could <tool_call>", "", [("add", '{"a": 1}')])


def test_an_unknown_format_is_a_wire_error() -> None:
    for fields in ({"tool_format": "x", "tool_names": NAMES}, {"tool_format": "named"}):
        with pytest.raises(WireError):
            message_parser(contexts.decode(context(**fields)))


@pytest.mark.parametrize(("tool_format", "mark"), [("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]")])
@pytest.mark.parametrize("opening", ['{"a":[', '{"a'])
def test_what_is_no_call_is_not_read_again_and_again(
    monkeypatch: pytest.MonkeyPatch, tool_format: str, mark: str, opening: str
) -> None:
    """Beginnings of 800 calls in each other, of which none was one, took five seconds."""
    num_read = 0
    take = CallObject.take

    def count(call: CallObject, character: str) -> None:
        nonlocal num_read
        num_read += 1
        take(call, character)

    monkeypatch.setattr(CallObject, "take", count)
    text = (mark + opening) * 500 + "]}" * 500 + '"}'
    assert parse(text, tool_format, size=4) == ("", text, [])
    assert num_read < 3 * len(text)


@pytest.mark.parametrize("tool_format", ["hermes", "llama3_json", "mistral", "json_list"])
def test_blanks_at_the_beginning_are_read_once(tool_format: str) -> None:
    """An answer of nothing but blanks took a detokenizer longer with every token."""
    parser = message_parser(contexts.decode(context(tool_format=tool_format, tool_names=NAMES)))
    assert parser is not None
    start = time.process_time()
    parts = [part for _ in range(20_000) for part in parser.push(" " * 64)]
    assert time.process_time() - start < 2
    wanted = "" if tool_format == "json_list" else " " * 64 * 20_000
    assert joined(parts + parser.flush()) == ("", wanted, [])


def test_a_name_has_an_end() -> None:
    text = '<tool_call>{"name": "' + "x" * (MAX_NAME_CHARS + 1)
    assert parse(text, "hermes", size=100) == ("", text, [])
    key = '<tool_call>{"' + "x" * (MAX_NAME_CHARS + 1) + '": 1, "name": "add"}'
    assert parse(key, "hermes", size=100) == ("", key, [])
    long = '<tool_call>{"arguments": "{}", "other": "' + "x" * 2 * MAX_NAME_CHARS + '", "name": "add"}'
    assert parse(long, "hermes", size=100) == ("", "", [("add", "{}")])
