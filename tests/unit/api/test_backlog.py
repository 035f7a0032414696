from __future__ import annotations

import random

from api.backlog import PIECE_BYTES, Backlog, Held


def test_everything_comes_out_in_order_and_in_pieces() -> None:
    choice = random.Random(1)
    held = Held()
    backlog = Backlog(held)
    expected = taken = b""
    for _ in range(500):
        if choice.random() < 0.6:
            data = choice.randbytes(choice.choice((0, 1, 100, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES)))
            backlog.add(memoryview(data) if choice.random() < 0.5 else data)
            expected += data
        elif backlog:
            taken += backlog.take()
        assert len(backlog) == len(expected) - len(taken)
        assert 0 <= backlog.num_joined <= len(backlog) <= backlog.held_bytes == held.num_bytes
    while backlog:
        taken += backlog.take()
    assert taken == expected
    assert backlog.num_joined == held.num_bytes == 0


def test_small_pieces_are_joined_and_large_ones_are_not_copied() -> None:
    backlog = Backlog(Held())
    large = bytes(2 * PIECE_BYTES + 1)
    for data in (b"a", b"b", large, b"c", b"d"):
        backlog.add(data)
    assert (len(backlog), backlog.num_joined) == (len(large) + 4, 4)
    assert backlog.take() == b"ab"
    assert backlog._pieces[0] is large
    assert [len(backlog.take()) for _ in range(3)] == [PIECE_BYTES, PIECE_BYTES, 1]
    backlog.clear()
    assert not backlog
    backlog.add(b"e")
    assert (backlog.take(), len(backlog), backlog.num_joined) == (b"e", 0, 0)


def test_what_is_held_is_held_whole_until_its_last_piece_is_taken() -> None:
    """Clients that left but the end of an answer unread would cost its whole length, and count as nothing."""
    held = Held()
    first, second = Backlog(held), Backlog(held)
    large = bytes(2 * PIECE_BYTES + 1)
    first.add(large)
    second.add(b"x")
    piece = first.take()
    first.take()
    assert (len(first), first.held_bytes, held.num_bytes) == (1, len(large), len(large) + 1)
    assert isinstance(piece, bytes), "a copy, which holds nothing"
    first.take()
    assert (first.held_bytes, held.num_bytes) == (0, 1)
    second.clear()
    assert held.num_bytes == 0
