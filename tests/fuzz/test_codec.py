"""Whatever bytes come in, ``decode`` raises nothing but WireError, soon and in little memory."""

from __future__ import annotations

import dataclasses
import struct
import time
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.wire_messages import messages
from tokservice.wire import codec
from tokservice.wire.errors import WireError
from tokservice.wire.messages import TAGS, WIRE_VERSION, FinishReason, Message, SamplingParams

PREFIXES = [bytes((WIRE_VERSION, tag)) for tag in TAGS]
MAX_PEAK_BYTES = 64 * 1024 * 1024


def _decode(frames: list[bytes]) -> Message | None:
    try:
        return codec.decode(frames)
    except WireError:
        return None


def _lie(count: int, size: str = ">I") -> bytes:
    return struct.pack(size, count)


# What msgpack can be made to promise or to nest, none of it a message's fields.
BOMBS: dict[str, bytes] = {
    "array that claims 2**32-1 items": b"\xdd" + _lie(2**32 - 1),
    "array that claims 65535 items": b"\xdc" + _lie(2**16 - 1, ">H"),
    "map that claims 2**32-1 pairs": b"\xdf" + _lie(2**32 - 1),
    "small map": msgpack.packb({"a": 1}),
    "string that claims 4 GiB": b"\xdb" + _lie(2**32 - 1),
    "bytes that claim 4 GiB": b"\xc6" + _lie(2**32 - 1),
    "extension that claims 4 GiB": b"\xc9" + _lie(2**32 - 1) + b"\x01",
    "timestamp": msgpack.packb(msgpack.Timestamp(1)),
    "extension": msgpack.packb(msgpack.ExtType(7, b"x")),
    "reserved byte": b"\xc1",
    "nil": b"\xc0",
    "nested arrays, 100000 deep": b"\x91" * 100_000,
    "nested arrays, each claiming what is left": b"".join(b"\xdd" + _lie(60_000) for _ in range(500)) + bytes(60_000),
    "nested arrays, each claiming millions": b"".join(b"\xdd" + _lie(4_000_000) for _ in range(500)) + bytes(4_000_000),
    "many empty arrays": b"\xdd" + _lie(2_000_000) + b"\x90" * 2_000_000,
    "string that is not UTF-8": b"\x91\xa2\xff\xfe",
    "surrogate in a string": b"\x91\xa3\xed\xa0\x80",
    "bytes for text": b"\x91\xc4\x01x",
    "more after the end": msgpack.packb(["a"]) + b"\x00",
    "not a number": b"\x91\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    "nothing": b"",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_bombs_cost_neither_memory_nor_time(bomb: bytes) -> None:
    tracemalloc.start()
    start = time.process_time()
    try:
        assert all(_decode([prefix + bomb]) is None for prefix in PREFIXES)
        cpu_s = time.process_time() - start
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MAX_PEAK_BYTES
    assert cpu_s < 0.5 * len(PREFIXES)


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_bombs_in_a_part(bomb: bytes) -> None:
    with pytest.raises(WireError):
        codec.decode_part(SamplingParams, bomb)


def test_a_header_beyond_its_limit_is_not_even_copied() -> None:
    header = memoryview(PREFIXES[0] + bytes(codec.MAX_HEADER_BYTES))
    tracemalloc.start()
    with pytest.raises(WireError):
        codec.decode([header])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1024 * 1024


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_frames(frames: list[bytes]) -> None:
    _decode(frames)


@given(st.sampled_from(PREFIXES), st.binary(max_size=200), st.lists(st.binary(max_size=20), max_size=4))
def test_random_headers_of_every_kind(prefix: bytes, packed: bytes, payload: list[bytes]) -> None:
    _decode([prefix + packed, *payload])


WILD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
)


@given(st.sampled_from(PREFIXES), st.lists(WILD, max_size=12), st.lists(st.binary(max_size=8), max_size=4))
def test_fields_of_any_number_and_type(prefix: bytes, values: list[Any], payload: list[bytes]) -> None:
    _decode([prefix + msgpack.packb(values), *payload])


@given(messages(), st.data())
def test_one_field_of_another_type(message: Message, data: st.DataObject) -> None:
    header, *payload = codec.encode(message)
    values = list(msgpack.unpackb(header[2:], use_list=False))
    place = data.draw(st.integers(0, len(values) - 1))
    values[place] = wild = data.draw(WILD)
    decoded = _decode([header[:2] + msgpack.packb(values), *payload])
    if decoded is not None:  # then the value was of the right type, and nothing else moved
        name = [item.name for item in dataclasses.fields(message) if item.name != "frames"][place]
        assert isinstance(wild, (int, float, str, list))
        kept = getattr(decoded, name)
        assert not isinstance(wild, bool) or kept is wild


@given(messages(), st.data())
def test_flipped_cut_and_grown_bytes(message: Message, data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in codec.encode(message)]
    frame = frames[data.draw(st.integers(0, len(frames) - 1))]
    place = data.draw(st.integers(0, len(frame)))
    match data.draw(st.sampled_from(("flip", "cut", "grow"))):
        case "flip" if place < len(frame):
            frame[place] ^= data.draw(st.integers(1, 255))
        case "cut":
            del frame[place:]
        case _:
            frame[place:place] = data.draw(st.binary(min_size=1, max_size=8))
    _decode([bytes(frame) for frame in frames])


@given(messages(), st.integers(0, 255))
def test_another_version_is_refused(message: Message, version: int) -> None:
    header, *payload = codec.encode(message)
    decoded = _decode([bytes([version]) + header[1:], *payload])
    assert (decoded is None) == (version != WIRE_VERSION)


@given(messages(), st.integers(0, 255))
def test_an_unknown_tag_is_refused(message: Message, tag: int) -> None:
    header, *payload = codec.encode(message)
    decoded = _decode([header[:1] + bytes([tag]) + header[2:], *payload])
    assert decoded is None or type(decoded) is TAGS[tag]


ANY_NUMBER_OF_FRAMES = {"Submit", "BodyChunk", "Prepare", "Accepted"}  # a body in pieces; one frame for each prompt
SIZED = [kind for kind in TAGS.values() if kind.__name__ not in ANY_NUMBER_OF_FRAMES]


@given(messages(SIZED), st.binary(max_size=8))
def test_a_frame_too_many_is_refused(message: Message, frame: bytes) -> None:
    assert _decode([*codec.encode(message), frame]) is None


@given(messages(SIZED))
def test_a_frame_too_few_is_refused(message: Message) -> None:
    *frames, _ = codec.encode(message)
    if frames and type(message).__name__ not in ("Submit", "BodyChunk"):
        assert _decode(frames) is None


CUT_TO_MEASURE = [kind for kind in TAGS.values() if kind.__name__ in ("EngineOutputs", "Progress", "ReadyBytes")]


@given(messages(CUT_TO_MEASURE), st.data())
def test_frames_of_another_length_are_refused(message: Message, data: st.DataObject) -> None:
    header, *payload = codec.encode(message)
    place = data.draw(st.integers(0, len(payload) - 1))
    payload[place] = bytes(payload[place]) + data.draw(st.binary(min_size=1, max_size=4))
    assert _decode([header, *payload]) is None


def test_more_frames_than_any_message_has() -> None:
    assert _decode([PREFIXES[0]] + [b""] * codec.MAX_FRAMES) is None


@pytest.mark.parametrize("low", [-1, codec.MAX_CHOICES])
def test_a_choice_that_cannot_be_is_refused(low: int) -> None:
    """The router makes room in its journal up to the choice that a message names: 2**40 would end it."""
    for kind in ("EngineOutputs", "Progress"):
        tag = next(tag for tag, known in TAGS.items() if known.__name__ == kind)
        columns: list[Any] = [["a"], [1], [low], [0], [0]]
        columns += [[0], [0], [0]] if kind == "Progress" else []
        payload = [b"", b""] if kind == "Progress" else [b""]
        frames = [bytes((WIRE_VERSION, tag)) + msgpack.packb(columns), *payload]
        assert _decode(frames) is None
        columns[2] = [0]
        assert _decode([bytes((WIRE_VERSION, tag)) + msgpack.packb(columns), *payload]) is not None


def test_an_unknown_finish_reason_is_refused() -> None:
    """Receivers build the enum from it: an unknown one would end them."""
    tag = next(tag for tag, known in TAGS.items() if known.__name__ == "EngineOutputs")
    for reason in range(-2, 9):
        frames = [bytes((WIRE_VERSION, tag)) + msgpack.packb([["a"], [1], [0], [0], [reason]]), b""]
        assert (_decode(frames) is not None) == (reason in list(FinishReason))
