"""Depth of raw JSON: the guard beside a walk over the bytes, one at a time."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokservice.tokenizer.json_guard import check_depth
from tokservice.wire.errors import RequestError

LONG_TEXT = b"plain text, so that quotes are rare. " * 50  # the guard has a way for rare quotes, and one for many
PIECES = st.sampled_from((b"[", b"{", b"]", b"}", b'"', b"\\", b'\\"', b"\\\\", b"\\n", b"x", b"", LONG_TEXT))
BYTES = st.lists(PIECES, max_size=40).map(b"".join)
VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(), st.sampled_from(('"', "\\", '\\"', "[[{", 'a"b' * 100))),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
    max_leaves=30,
)


def guarded_depth(body: bytes) -> int:
    """The least depth that the guard lets through."""
    limit = 0
    while True:
        with contextlib.suppress(RequestError):
            check_depth(body, limit)
            return limit
        limit += 1


def walked_depth(body: bytes) -> int:
    """The greatest surplus of opening brackets outside strings, byte by byte."""
    depth = deepest = 0
    in_string = escaped = False
    for byte in body:
        character = chr(byte)
        if escaped:
            escaped = False
            if character == '"':
                continue
        elif character == "\\":
            escaped = True
        elif character == '"':
            in_string = not in_string
        if not in_string:
            depth += (character in "[{") - (character in "]}")
            deepest = max(deepest, depth)
    return deepest


@given(BYTES)
@example(b'"' + LONG_TEXT + b'\\\\",[[[')
@example(b'"' + LONG_TEXT + b'\\\\\\",[[[')
@example(b'\\"[[' + LONG_TEXT)
@example(b'"' + LONG_TEXT + b'"\\"[["' + LONG_TEXT)
def test_any_bytes(body: bytes) -> None:
    """Malformed bodies too: a parser must not get to see more nesting than was counted."""
    assert guarded_depth(body) == walked_depth(body)


@given(VALUES, st.booleans())
def test_any_json(value: Any, is_long: bool) -> None:
    """As deep as the value is, whatever its strings hold."""
    body = json.dumps([value, LONG_TEXT.decode()] if is_long else [value]).encode()
    assert guarded_depth(body) == 1 + _depth(value)


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(_depth, value), default=0)
    return 0


@pytest.mark.parametrize("is_long", [False, True])
def test_brackets_in_a_string_do_not_count(is_long: bool) -> None:
    text = '[{"' * 100 + (LONG_TEXT.decode() * 20 if is_long else "")
    assert guarded_depth(json.dumps({"prompt": text}).encode()) == 1
