from __future__ import annotations

import random

from api.backlog import PIECE_BYTES, Backlog


def test_everything_comes_out_in_order_and_in_pieces() -> None:
    choice = random.Random(1)
    backlog = Backlog()
    expected = taken = b""
    for _ in range(500):
        if choice.random() < 0.6:
            data = choice.randbytes(choice.choice((0, 1, 100, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES)))
            backlog.add(memoryview(data) if choice.random() < 0.5 else data)
            expected += data
        elif backlog:
            taken += backlog.take()
        assert len(backlog) == len(expected) - len(taken)
        assert 0 <= backlog.num_joined <= len(backlog)
    while backlog:
        taken += backlog.take()
    assert taken == expected
    assert backlog.num_joined == 0


def test_small_pieces_are_joined_and_large_ones_are_not_copied() -> None:
    backlog = Backlog()
    large = bytes(2 * PIECE_BYTES + 1)
    for data in (b"a", b"b", large, b"c", b"d"):
        backlog.add(data)
    assert (len(backlog), backlog.num_joined) == (len(large) + 4, 4)
    assert backlog.take() == b"ab"
    pieces = [backlog.take() for _ in range(3)]
    assert [len(piece) for piece in pieces] == [PIECE_BYTES, PIECE_BYTES, 1]
    assert all(isinstance(piece, memoryview) and piece.obj is large for piece in pieces)
    backlog.clear()
    assert not backlog
    backlog.add(b"e")
    assert (backlog.take(), len(backlog), backlog.num_joined) == (b"e", 0, 0)
