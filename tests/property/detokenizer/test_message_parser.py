"""However a text is cut into pieces, a parser makes the same of it, and nothing that the model said is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.contexts import context
from tests.unit.detokenizer.test_message_parser import NAMES, Message, joined
from tokservice.detokenizer.message_parser import message_parser
from tokservice.protocol import context as contexts

FRAGMENTS = [
    *["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"],
    *['{"name": "add", "arguments": {"a": 1}}', '{"name": "add", ', '"parameters": ', '{"a": [1, "}"]}', "}", "{", "]"],
    *['{"name": "patch", "arguments": ', '{"input": "', '{"input": "a\\n"}', "\\ud83d", "\\ude00", "\\u00"],
    *["[", ", ", "; ", '"', "\\", "add", "x", " ", "\n", "<", "</", "1", ":", "é😀"],
]
FORMATS = ["", "hermes", "llama3_json", "mistral", "json_list", "named", "input"]

texts = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
formats = st.sampled_from([(tool, reasoning) for tool in FORMATS for reasoning in ("", "tagged", "open", "inside")][1:])


def parse(form: tuple[str, str], pieces: list[str]) -> Message:
    tools = {"tool_format": form[0], "tool_names": ("patch", *NAMES), "custom_tools": ("patch",)}
    parser = message_parser(contexts.decode(context(**tools, reasoning=form[1])))
    assert parser is not None
    parts = [part for piece in pieces for part in parser.push(piece)]
    return joined(parts + parser.flush())


@given(formats, texts, st.data())
def test_cuts_do_not_matter(form: tuple[str, str], text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(form, pieces) == parse(form, list(text)) == parse(form, [text])


@given(st.sampled_from(FORMATS[1:4]), texts)
def test_without_a_call_all_is_content(tool_format: str, text: str) -> None:
    _, content, calls = parse((tool_format, ""), [text])
    if not calls:
        assert content == text
