"""JSON that grows, as bytes. Used by the detokenizer workers.

What a long answer says is written as it comes: then nothing large is left to be done at its end, and no objects are
kept, of which there would be many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from tokservice.protocol.json_text import json_text, json_value

PIECE_BYTES = 1 << 16


class Written:
    """Bytes that grow, in pieces: neither growing nor reading copies much at once. ``len`` is their number."""

    __slots__ = ("_last", "_num_before", "_pieces")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._num_before = 0  # bytes in them
        self._last = bytearray()

    def __len__(self) -> int:
        return self._num_before + len(self._last)

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces
        yield bytes(self._last)

    def add(self, data: bytes) -> None:
        """More of them."""
        self._last += data
        if len(self._last) >= PIECE_BYTES:
            self._pieces.append(bytes(self._last))
            self._num_before += len(self._last)
            self._last.clear()

    def copy(self) -> Written:
        """The same so far; it grows apart."""
        twin = Written()
        twin._pieces, twin._num_before, twin._last = self._pieces.copy(), self._num_before, self._last.copy()
        return twin


class JsonString:
    """A JSON string that grows."""

    __slots__ = ("_written",)

    def __init__(self) -> None:
        self._written = Written()

    def __len__(self) -> int:
        """Bytes between its quotes."""
        return len(self._written)

    def __iter__(self) -> Iterator[bytes]:
        """What it is now, in pieces."""
        yield b'"'
        yield from self._written
        yield b'"'

    def add(self, text: str) -> bytes:
        """More of it; returns that as a JSON string of its own."""
        told = json_text(text)
        self._written.add(told[1:-1])
        return told


class JsonList:
    """A JSON list that grows."""

    __slots__ = ("_written",)

    def __init__(self, written: Written | None = None) -> None:
        self._written = Written() if written is None else written

    def __len__(self) -> int:
        """Bytes between its brackets."""
        return len(self._written)

    def __iter__(self) -> Iterator[bytes]:
        """What it is now, in pieces."""
        yield b"["
        yield from self._written
        yield b"]"

    def extend(self, values: Sequence[Any]) -> bytes:
        """More values; returns them as a JSON list of their own."""
        told = json_value(values)
        self.join(told)
        return told

    def join(self, values: bytes) -> None:
        """The values of another JSON list."""
        if len(values) > len(b"[]"):
            self._written.add(b"," + values[1:-1] if len(self._written) else values[1:-1])

    def copy(self) -> JsonList:
        """The same so far; it grows apart."""
        return JsonList(self._written.copy())


def one_string(strings: Iterable[JsonString]) -> list[bytes]:
    """What they are now as one JSON string, in pieces."""
    return [b'"', *chain.from_iterable(list(string)[1:-1] for string in strings), b'"']
