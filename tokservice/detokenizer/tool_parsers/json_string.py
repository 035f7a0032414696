"""Reads JSON strings as models write them. Detokenizer worker; pure."""

from __future__ import annotations

import json


def string_value(text: str) -> str | None:
    """The value of a JSON string; None where it is none. A half of a surrogate pair becomes U+FFFD: no text can hold it."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return without_halves(value) if isinstance(value, str) else None


def without_halves(text: str) -> str:
    """The text with its surrogate pairs joined; a half of one is replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
