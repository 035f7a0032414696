"""Reads JSON strings as models write them, whole or as they come. Detokenizer worker; pure.

What a string must escape and does not stands for itself, as does what is no escape. A half of a surrogate pair becomes
U+FFFD: no text can hold it.
"""

from __future__ import annotations

import json
import re

# A stretch without escapes, an escape, or one that breaks off. A match ends before an escape that may go on.
_TOKEN = re.compile(r'[^"\\]+|\\u[0-9a-fA-F]{4}|\\u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F])|\\[^u]', re.DOTALL)
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\b": "\b", "\\f": "\f", '\\"': '"', "\\\\": "\\", "\\/": "/"}
_UNICODE_ESCAPE = 6  # characters


def string_value(text: str) -> str | None:
    """The value of a whole JSON string; None where it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return without_halves(value) if isinstance(value, str) else None


def without_halves(text: str) -> str:
    """The text with its surrogate pairs joined; a half of one is replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class StringReader:
    """Reads one string from behind its opening quote on."""

    def __init__(self) -> None:
        self.is_done = False
        self._raw = ""  # not yet read

    def push(self, text: str) -> str:
        """What more of it says. What follows the closing quote is left out."""
        if self.is_done:
            return ""
        self._raw += text
        pieces: list[str] = []
        place = 0
        while token := _TOKEN.match(self._raw, place):
            pieces.append(_value(token[0]))
            place = token.end()
        self.is_done = self._raw.startswith('"', place)
        if pieces and not self.is_done and "\ud800" <= pieces[-1] < "\udc00":
            pieces.pop()  # the other half may follow
            place -= _UNICODE_ESCAPE
        self._raw = self._raw[place:]
        return without_halves("".join(pieces))


def _value(token: str) -> str:
    if token.startswith("\\u") and len(token) == _UNICODE_ESCAPE:
        return chr(int(token[2:], 16))
    return _ESCAPES.get(token, token)
