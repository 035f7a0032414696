"""Work in slices of bounded size, between which others have their turn. Detokenizer worker; pure.

A generator does the work, and yields where a slice is over. What counts is how much was done, never a clock: so it
depends on the request alone.
"""

from __future__ import annotations

import mmap
from collections.abc import Generator
from typing import Any, TypeVar

from tokservice.wire.messages import Buffer

SLICE = 512  # units of some 2 µs: an entry about a token, a character that is parsed, or
COPIED_BYTES = 4096  # at once
JOINED_AT_ONCE = 1 << 20  # bytes
T = TypeVar("T")
Slices = Generator[None, None, T]


class Pace:
    """What is left of a slice."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A new slice."""
        self._left = SLICE

    def is_over(self, units: int) -> bool:
        """Whether so much more work ends the slice."""
        self._left -= units
        if self._left > 0:
            return False
        self.begin()
        return True


def at_once(work: Generator[Any, None, T]) -> T:
    """The result of work that nobody interrupts."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def joined(pieces: list[bytes], pace: Pace) -> Slices[Buffer]:
    """The pieces as one; the list is emptied."""
    size = sum(map(len, pieces))
    if size <= JOINED_AT_ONCE:
        whole = b"".join(pieces)
        pieces.clear()
        return whole
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # which the system gives page by page
    pieces.reverse()
    while pieces:
        piece = pieces.pop()
        memory.write(piece)
        if pace.is_over(1 + len(piece) // COPIED_BYTES):
            yield
    return memory
