"""Nesting depth of a raw JSON body, without a parser and without recursion. Tokenizer worker; pure.

JSON parsers recurse; a body of brackets alone would exhaust their stack. This runs before them.
"""

from __future__ import annotations

from itertools import accumulate

from tokservice.wire.errors import RequestError

_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes: +1, -1


def check_depth(body: bytes, max_depth: int, param: str | None = None) -> None:
    """Raise RequestError (400) if arrays and objects nest deeper than ``max_depth``. Linear, in C loops."""
    if b"\\" in body:  # what follows a backslash ends no string
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside_strings = b"".join(body.split(b'"')[::2])
    steps = outside_strings.translate(_STEPS, _NOT_BRACKETS)
    if max(accumulate(memoryview(steps).cast("b")), default=0) > max_depth:
        message = f"The JSON is nested more than {max_depth} levels deep."
        raise RequestError(message, param=param, code="invalid_json")
