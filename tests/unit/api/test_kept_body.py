"""What waits of a body: nothing lost, nothing copied that is large, nothing kept in crumbs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from api.kept_body import KeptBody
from tokservice.wire.codec import MAX_CHUNK_BYTES

SIZES = st.one_of(
    st.integers(0, 100),
    st.sampled_from((MAX_CHUNK_BYTES - 1, MAX_CHUNK_BYTES, MAX_CHUNK_BYTES + 1, 4 * MAX_CHUNK_BYTES, 300_000)),
)


@given(st.lists(SIZES, max_size=12), st.data())
def test_everything_comes_out_once_and_in_order(sizes: list[int], data: st.DataObject) -> None:
    """In frames that the wire takes, whatever the pieces and whenever they are taken."""
    it, put, taken = KeptBody(), bytearray(), bytearray()
    for index, size in enumerate(sizes):
        piece = bytes([index]) * size
        it.add(memoryview(piece) if data.draw(st.booleans()) else piece)
        put += piece
        assert len(it) == len(put) - len(taken)
        if data.draw(st.booleans()):
            frames = it.take()
            assert all(0 < len(frame) <= MAX_CHUNK_BYTES for frame in frames)
            taken += b"".join(frames)
            assert taken == put
            assert not len(it)


def test_crumbs_are_joined() -> None:
    """A body in pieces of a byte would cost fifty times its size, and a message of thousands of frames."""
    it = KeptBody()
    for _ in range(1000):
        it.add(b"ab")
    assert it.take() == (b"ab" * 1000,)


def test_large_pieces_are_not_copied() -> None:
    """The HTTP loop would pay for every byte of a long prompt once more."""
    it, piece = KeptBody(), bytes(3 * MAX_CHUNK_BYTES)
    it.add(b"x")
    it.add(piece)
    it.add(b"y")
    first, *views, last = it.take()
    assert (first, last) == (b"x", b"y")
    assert [view.obj is piece for view in views] == [True] * 3


def test_clearing() -> None:
    it = KeptBody()
    it.add(b"abc")
    it.clear()
    assert (len(it), it.take()) == (0, ())
