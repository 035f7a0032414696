"""The form of messages on the wire, as the other side of an upgrade would see it."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest

from tokservice.wire import codec
from tokservice.wire.errors import WireError
from tokservice.wire.messages import (
    TAGS,
    WIRE_VERSION,
    Begin,
    BodyChunk,
    Generate,
    Hello,
    Message,
    Prepare,
    Role,
    SamplingParams,
    Submit,
)


def test_header_is_version_tag_and_a_list() -> None:
    header, body = codec.encode(Submit("api.0.1:7", 1, 5, True, frames=(b"hello",)))
    assert header[:2] == bytes((WIRE_VERSION, 1))
    assert msgpack.unpackb(header[2:]) == ["api.0.1:7", 1, 5, True, ""]
    assert body == b"hello"


def test_payload_is_passed_on_as_the_same_objects() -> None:
    """Bodies of megabytes go through the router: a copy on the way would stall its loop."""
    body = (bytearray(b"one"), memoryview(b"two"))
    message = Prepare("r", 1, 1, "engine.0.1", "detokenizer.0.1", body)
    assert [id(frame) for frame in codec.encode(message)[1:]] == [id(frame) for frame in body]
    decoded = codec.decode(codec.encode(message))
    assert isinstance(decoded, Prepare)
    assert [id(frame) for frame in decoded.frames] == [id(frame) for frame in body]


def test_tags_are_those_of_version_1() -> None:
    """A tag never changes its meaning within a wire version."""
    names = {tag: kind.__name__ for tag, kind in TAGS.items()}
    assert WIRE_VERSION == 1
    assert names == {
        1: "Submit",
        2: "BodyChunk",
        3: "Abort",
        10: "Prepare",
        11: "Accepted",
        12: "Rejected",
        13: "Answered",
        20: "Generate",
        21: "Undelivered",
        30: "Begin",
        31: "EngineOutputs",
        32: "PromptLogprobs",
        40: "Progress",
        41: "ReadyBytes",
        50: "Hello",
        51: "Heartbeat",
        52: "Topology",
        53: "Publish",
        54: "Stop",
    }


def test_every_message_class_has_a_tag() -> None:
    assert set(TAGS.values()) == set(Message.__args__)


def test_every_message_is_frozen_and_slotted() -> None:
    for kind in TAGS.values():
        assert kind.__dataclass_params__.frozen, kind  # type: ignore[union-attr]
        assert "__slots__" in vars(kind), kind


def test_a_field_with_a_default_may_be_missing() -> None:
    packed = msgpack.packb(["engine.0.1", int(Role.ENGINE), WIRE_VERSION, 1])
    assert codec.decode([bytes((WIRE_VERSION, 50)) + packed]) == Hello("engine.0.1", Role.ENGINE, WIRE_VERSION, 1)


def test_the_error_names_the_field() -> None:
    packed = msgpack.packb(["r", 1, "much", True])
    with pytest.raises(WireError, match=r"Submit\.content_length: expected int, got str"):
        codec.decode([bytes((WIRE_VERSION, 1)) + packed])


def test_true_is_no_number_and_1_is_no_truth() -> None:
    for values in (["r", 1, True, True], ["r", 1, 1, 1]):
        with pytest.raises(WireError, match="expected"):
            codec.decode([bytes((WIRE_VERSION, 1)) + msgpack.packb(values)])


@pytest.mark.parametrize("route", [0, 99, -1, 2**40])
def test_an_unknown_route_goes_no_further(route: int) -> None:
    """A tokenizer worker builds the enum from it: an unknown one would end every worker in turn."""
    for message in (Submit("r", route, 0, True), Prepare("r", 1, route, "e", "d")):
        with pytest.raises(WireError):
            codec.decode(codec.encode(message))


def test_chunks_are_limited() -> None:
    whole = bytes(codec.MAX_CHUNK_BYTES)
    assert codec.decode(codec.encode(BodyChunk("r", True, (whole,)))) == BodyChunk("r", True)
    with pytest.raises(WireError):
        codec.decode(codec.encode(BodyChunk("r", True, (whole + b"x",))))


FIRST = Generate("r", 1, "d", 1, frames=(b"sampling", b"context", b"\0\0\0\1"))
CONTINUED = dataclasses.replace(
    FIRST, attempt=2, num_delivered=(1, 0), finished=(0, 1), frames=(*FIRST.frames, b"\0\0\0\2", b"")
)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (FIRST, {"num_prompts": 0}),
        (FIRST, {"num_prompts": -1}),
        (FIRST, {"num_prompts": 2}),
        (FIRST, {"finished": (0,)}),
        (FIRST, {"frames": (b"sampling", b"context", b"\0\0\0")}),
        (CONTINUED, {"num_delivered": (1,)}),
        (CONTINUED, {"num_delivered": (2, 0)}),
        (CONTINUED, {"num_delivered": (-1, 0)}),
        (CONTINUED, {"finished": (0, 9)}),
        (CONTINUED, {"finished": ()}),
    ],
)
def test_generate_must_fit_its_frames(message: Generate, change: dict[str, object]) -> None:
    assert codec.decode(codec.encode(message)) == message
    with pytest.raises(WireError):
        codec.decode(codec.encode(dataclasses.replace(message, **change)))  # type: ignore[arg-type]


def test_begin_cannot_have_delivered_more_than_was_produced() -> None:
    good = Begin("r", 2, "e", (1,), (0,), frames=(b"context", b"\0\0\0\2"))
    assert codec.decode(codec.encode(good)) == good
    with pytest.raises(WireError):
        codec.decode(codec.encode(dataclasses.replace(good, num_delivered=(2,))))


def test_notes_follow_the_outputs() -> None:
    good = Begin("r", 2, "e", (1,), (0,), has_notes=True, frames=(b"context", b"\0\0\0\2", b"any"))
    assert codec.decode(codec.encode(good)) == good
    for wrong in ({"has_notes": False}, {"frames": good.frames[:2]}, {"frames": (*good.frames, b"")}):
        with pytest.raises(WireError):
            codec.decode(codec.encode(dataclasses.replace(good, **wrong)))


def test_a_part_has_exactly_its_fields() -> None:
    sampling = SamplingParams(n=2, stop_token_ids=(1, 2), bad_words_ids=((1,), (2, 3)))
    assert codec.decode_part(SamplingParams, codec.encode_part(sampling)) == sampling
    with pytest.raises(WireError):
        codec.decode_part(SamplingParams, msgpack.packb([*dataclasses.astuple(sampling), 1]))
    with pytest.raises(WireError):
        codec.decode_part(SamplingParams, b"\xdb\xff\xff\xff\xff")


@pytest.mark.parametrize(
    "identity", ["", "engine", "engine.0", "engine.0.1.2", "engine.a.1", "router.0.1", "engine.0.-1", "engine.0.1" * 99]
)
def test_a_hello_has_the_identity_of_its_role(identity: str) -> None:
    """The router reads the slot from it: a malformed one would end the router."""
    good = Hello("engine.0.1", Role.ENGINE, WIRE_VERSION, 1)
    assert codec.decode(codec.encode(good)) == good
    with pytest.raises(WireError):
        codec.decode(codec.encode(dataclasses.replace(good, identity=identity)))
