"""JSON that no line reader splits, for events and bodies. Used by the detokenizer workers."""

from __future__ import annotations

from typing import Any

import orjson


def json_text(text: str) -> bytes:
    """A JSON string.

    Control characters are escaped by JSON itself; the line ends that JSON allows and that some clients honour
    (U+0085, U+2028, U+2029) are escaped too.
    """
    data = orjson.dumps(text)
    return data if text.isascii() else _escape_line_ends(data)


def json_value(value: Any) -> bytes:
    """Any JSON value; line ends occur in strings alone, so escaping them is right everywhere."""
    return _escape_line_ends(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))


def _escape_line_ends(data: bytes) -> bytes:
    data = data.replace(b"\xc2\x85", b"\\u0085")
    return data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
