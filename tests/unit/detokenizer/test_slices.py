from __future__ import annotations

import pytest

from tokservice.detokenizer import slices
from tokservice.detokenizer.slices import COPIED_BYTES, SLICE, Pace, at_once, joined


def test_a_pace_counts_work_of_any_size() -> None:
    pace = Pace()
    assert [pace.is_over(SLICE // 2) for _ in range(4)] == [False, True, False, True]
    assert pace.is_over(100 * SLICE)
    assert not pace.is_over(SLICE - 1)
    pace.begin()
    assert not pace.is_over(SLICE - 1)


def test_a_little_is_joined_at_once() -> None:
    pieces = [b"ab", b"", b"c"]
    with pytest.raises(StopIteration) as end:
        next(joined(pieces, Pace()))
    assert (end.value.value, pieces) == (b"abc", [])


def test_much_is_joined_piece_by_piece() -> None:
    """Joining 60 MB at once took 26 ms."""
    pieces = [bytes([place % 256]) * (5 * COPIED_BYTES + place) for place in range(1000)]
    expected = b"".join(pieces)
    work = joined(pieces, Pace())
    sizes = [len(pieces) for _ in work]
    assert not pieces
    steps = [before - after for before, after in zip([1000, *sizes], [*sizes, 0], strict=True)]
    assert len(steps) > 5
    assert max(steps) <= SLICE // 5
    again = [bytes([place % 256]) * (5 * COPIED_BYTES + place) for place in range(1000)]
    assert bytes(at_once(joined(again, Pace()))) == expected


def test_any_size_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "JOINED_AT_ONCE", 0)
    assert bytes(at_once(joined([b"ab", b"", b"c"], Pace()))) == b"abc"
    assert bytes(at_once(joined([], Pace()))) == b""
