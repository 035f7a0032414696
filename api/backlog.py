"""Bytes that wait until their client has read what came before. Pure: no sockets, no clock. API process.

Small pieces, the deltas of a stream, are joined. Large ones, whole answers, are never copied as a whole, and are
written piece by piece: either would take a turn of the loop for itself.
"""

from __future__ import annotations

from collections import deque

from tokservice.wire.messages import Buffer

PIECE_BYTES = 64 * 1024


class Backlog:
    """First come, first written; its length is in bytes."""

    def __init__(self) -> None:
        self.num_joined = 0  # bytes of small pieces
        self._num_bytes = 0
        self._pieces: deque[bytearray | memoryview] = deque()

    def __len__(self) -> int:
        return self._num_bytes

    def add(self, data: Buffer) -> None:
        """More bytes; large ones must stay as they are until they are taken."""
        self._num_bytes += len(data)
        if len(data) > PIECE_BYTES:
            self._pieces.append(memoryview(data))
            return
        self.num_joined += len(data)
        if self._pieces and isinstance(self._pieces[-1], bytearray):
            self._pieces[-1] += data
        else:
            self._pieces.append(bytearray(data))

    def take(self) -> bytes | memoryview:
        """The next bytes to write; there must be some."""
        piece = self._pieces.popleft()
        if isinstance(piece, bytearray):
            self.num_joined -= len(piece)
        elif len(piece) > PIECE_BYTES:
            self._pieces.appendleft(piece[PIECE_BYTES:])
            piece = piece[:PIECE_BYTES]
        self._num_bytes -= len(piece)
        return piece if isinstance(piece, memoryview) else bytes(piece)

    def clear(self) -> None:
        """Nobody wants them any more."""
        self.num_joined = self._num_bytes = 0
        self._pieces.clear()
