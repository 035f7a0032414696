"""Log-probabilities of some tokens as the engine sends them, and as the router's journal keeps them.

Detokenizer worker; pure. The journal keeps what cannot be had again from token ids: a *note* is one block for each
step, a header of three uint32 (what it is about, tokens, entries of a token), then ids and values, little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokservice.detokenizer.slices import COPIED_BYTES, Pace, Slices
from tokservice.wire.errors import WireError
from tokservice.wire.messages import Buffer

_HEADER = struct.Struct("<III")


class About(IntEnum):
    """Which tokens a block of a note is about."""

    PROMPT = 0  # the second and all later ones
    OUTPUT = 1


_ABOUTS = frozenset(About)
Row = tuple[list[int], list[float]]  # entries of one token: ids and values, its own first


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Rows of ``width`` entries, one row for each token: the token itself, then the most likely ones."""

    width: int
    ids: Sequence[int]  # (num_tokens * width,)
    values: Sequence[float]  # the same; natural logarithms

    def __len__(self) -> int:
        return len(self.ids) // self.width

    def row(self, place: int) -> Row:
        """The row of one token: a copy, or whoever keeps it would keep the message that it came with."""
        cut = slice(place * self.width, (place + 1) * self.width)
        return list(self.ids[cut]), list(self.values[cut])

    def part(self, start: int, end: int) -> LogprobRows:
        """The rows of some of the tokens."""
        cut = slice(start * self.width, end * self.width)
        return LogprobRows(self.width, self.ids[cut], self.values[cut])


def view(width: int, ids: Buffer, values: Buffer) -> LogprobRows:
    """Rows in two buffers of little-endian uint32 and float32."""
    return LogprobRows(width, memoryview(ids).cast("B").cast("I"), memoryview(values).cast("B").cast("f"))


def are_same(one: LogprobRows | None, other: LogprobRows | None) -> bool:
    """Whether they say the same, bit by bit."""
    if one is None or other is None:
        return one is other
    return one.width == other.width and _packed(one) == _packed(other)


def _packed(rows: LogprobRows) -> tuple[bytes, bytes]:
    return _bytes_of(rows.ids, "I"), _bytes_of(rows.values, "f")


def write_note(about: About, rows: LogprobRows) -> bytes:
    """A block for the journal."""
    return _HEADER.pack(about, len(rows), rows.width) + b"".join(_packed(rows))


def _bytes_of(values: Sequence[float] | memoryview, code: str) -> bytes:
    if isinstance(values, memoryview):  # as it came
        return values.tobytes()
    return struct.pack(f"<{len(values)}{code}", *values)


def read_note(note: bytes | memoryview, pace: Pace) -> Slices[dict[About, LogprobRows]]:
    """All blocks of a note, those about the same tokens joined. Raises WireError."""
    found: dict[About, tuple[int, bytearray, bytearray]] = {}  # width, ids, values
    rest = memoryview(note).cast("B")
    while rest:
        if len(rest) < _HEADER.size:
            raise WireError("a note of the journal ends in a header")
        about, num_tokens, width = _HEADER.unpack_from(rest)
        end = _HEADER.size + num_tokens * width * 8
        if about not in _ABOUTS or width == 0 or end > len(rest):
            raise WireError("malformed note in the journal")
        middle = (_HEADER.size + end) // 2
        known_width, ids, values = found.setdefault(About(about), (width, bytearray(), bytearray()))
        if known_width != width:
            raise WireError("uneven note in the journal")
        ids += rest[_HEADER.size : middle]
        values += rest[middle:end]
        rest = rest[end:]
        if pace.is_over(1 + end // COPIED_BYTES):
            yield
    return {about: view(width, ids, values) for about, (width, ids, values) in found.items()}
