"""Nesting depth of a raw JSON body, without a parser and without recursion. Tokenizer worker; pure.

JSON parsers recurse; a body of brackets alone would exhaust their stack. This runs before them.
"""

from __future__ import annotations

from itertools import accumulate

from tokservice.wire.errors import RequestError

_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes: +1, -1
_BACKSLASH = ord("\\")
_BYTES_PER_QUOTE = 64  # where quotes are denser, a loop over them in C is cheaper than one in Python


def check_depth(body: bytes, max_depth: int, param: str | None = None) -> None:
    """Raise RequestError (400) if arrays and objects nest deeper than ``max_depth``. Linear."""
    steps = _outside_strings(body).translate(_STEPS, _NOT_BRACKETS)
    if max(accumulate(memoryview(steps).cast("b")), default=0) > max_depth:
        message = f"The JSON is nested more than {max_depth} levels deep."
        raise RequestError(message, param=param, code="invalid_json")


def _outside_strings(body: bytes) -> bytes:
    """A body less its strings. A quote after a backslash, which is not itself escaped, neither begins nor ends one."""
    if b"\\" not in body:
        return b"".join(body.split(b'"')[::2])
    max_quotes = len(body) // _BYTES_PER_QUOTE
    pieces = body.split(b'"', max_quotes)
    if len(pieces) > max_quotes:
        return b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    outside = []
    rest = iter(pieces)
    for piece in rest:
        outside.append(piece)
        if _ends_escaping(piece):
            continue
        for inside in rest:  # a long text has thousands of escaped quotes: the usual piece is judged right here
            if not inside or inside[-1] != _BACKSLASH or (inside[-2:-1] == b"\\" and not _ends_escaping(inside)):
                break
    return b"".join(outside)


def _ends_escaping(piece: bytes) -> bool:
    """Whether the last backslash of the run at its end escapes what follows."""
    return (len(piece) - len(piece.rstrip(b"\\"))) % 2 == 1
