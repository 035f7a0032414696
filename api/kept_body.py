"""Body bytes that have arrived and are not yet passed on, in the pieces in which they came. Pure; API process."""

from __future__ import annotations

from tokservice.wire.codec import MAX_CHUNK_BYTES
from tokservice.wire.messages import Buffer


class KeptBody:
    """Small pieces are joined, so that a body in thousands of them costs no more than its bytes; large ones are kept
    as they are, so that nobody copies them."""

    def __init__(self) -> None:
        self._pieces: list[Buffer] = []
        self._num_bytes = 0

    def __len__(self) -> int:
        """Bytes."""
        return self._num_bytes

    def add(self, data: Buffer) -> None:
        """One more piece."""
        self._num_bytes += len(data)
        if len(data) >= MAX_CHUNK_BYTES:
            self._pieces.append(data)
        elif self._pieces and isinstance(self._pieces[-1], bytearray):
            self._pieces[-1] += data
        else:
            self._pieces.append(bytearray(data))

    def take(self) -> tuple[Buffer, ...]:
        """Remove everything: in frames that the wire takes, in order."""
        pieces = self._pieces
        self.clear()
        return tuple(
            piece if len(piece) <= MAX_CHUNK_BYTES else memoryview(piece)[start : start + MAX_CHUNK_BYTES]
            for piece in pieces
            for start in range(0, len(piece), MAX_CHUNK_BYTES)
        )

    def clear(self) -> None:
        """Remove everything, unread."""
        self._pieces = []
        self._num_bytes = 0
