"""Bytes that wait until their client has read what came before. Pure: no sockets, no clock. API process.

Small pieces, the deltas of a stream, are joined. Large ones, whole answers, are never copied as a whole, and are
written piece by piece: either would take a turn of the loop for itself.
"""

from __future__ import annotations

from collections import deque

from tokservice.wire.messages import Buffer

PIECE_BYTES = 64 * 1024


class Held:
    """Bytes that the backlogs of all connections keep in memory."""

    def __init__(self) -> None:
        self.num_bytes = 0


class Backlog:
    """First come, first written; its length is in bytes."""

    def __init__(self, held: Held) -> None:
        self.num_joined = 0  # bytes of small pieces
        self.held_bytes = 0  # those too that have left already, of a large piece whose rest has not
        self._held = held
        self._num_bytes = 0
        self._pieces: deque[Buffer] = deque()
        self._start = 0  # of what is left of the first piece

    def __len__(self) -> int:
        return self._num_bytes

    def add(self, data: Buffer) -> None:
        """More bytes; large ones must stay as they are until they are taken."""
        size = len(data)
        self._num_bytes += size
        self._hold(size)
        if size > PIECE_BYTES:
            self._pieces.append(data)
            return
        self.num_joined += size
        if self._pieces and isinstance(self._pieces[-1], bytearray):
            self._pieces[-1] += data
        else:
            self._pieces.append(bytearray(data))

    def take(self) -> bytes:
        """The next bytes to write; there must be some. A copy: what stays for long must not hold a whole answer."""
        piece = self._pieces[0]
        is_joined = isinstance(piece, bytearray)
        data = bytes(piece if is_joined else piece[self._start : self._start + PIECE_BYTES])
        self._num_bytes -= len(data)
        self._start += len(data)
        if self._start == len(piece):
            del self._pieces[0]
            self._start = 0
            self._hold(-len(piece))
            self.num_joined -= len(piece) if is_joined else 0
        return data

    def clear(self) -> None:
        """Nobody wants them any more."""
        self._hold(-self.held_bytes)
        self.num_joined = self._num_bytes = self._start = 0
        self._pieces.clear()

    def _hold(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self._held.num_bytes += num_bytes
