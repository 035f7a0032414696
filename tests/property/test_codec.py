"""Every message survives the wire, whatever its values."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.wire_messages import messages, parts
from tokservice.wire import codec
from tokservice.wire.errors import WireError
from tokservice.wire.messages import TAGS, Message, SamplingParams


def _fields(message: Any) -> dict[str, Any]:
    """All of them: equality leaves the frames out."""
    return {item.name: getattr(message, item.name) for item in dataclasses.fields(message)}


@pytest.mark.parametrize("kind", TAGS.values(), ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_round_trip(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages([kind]))
    decoded = codec.decode(codec.encode(message))
    assert type(decoded) is kind
    assert _fields(decoded) == _fields(message)


@given(messages())
def test_fields_keep_their_exact_types(message: Message) -> None:
    """True, 1 and 1.0 are equal: equality alone would not see one become the other."""
    for name, value in _fields(codec.decode(codec.encode(message))).items():
        assert type(value) is type(getattr(message, name)), name


@given(messages(), st.lists(st.booleans(), min_size=64, max_size=64))
def test_frames_may_be_any_buffers(message: Message, as_view: list[bool]) -> None:
    frames = [memoryview(frame) if view else frame for frame, view in zip(codec.encode(message), as_view, strict=False)]
    assert codec.decode(frames) == message


@given(parts(SamplingParams))
def test_round_trip_of_a_part(sampling: SamplingParams) -> None:
    assert codec.decode_part(SamplingParams, codec.encode_part(sampling)) == sampling


@given(messages())
def test_a_message_without_its_last_field_is_decoded_only_where_that_has_a_default(
    message: Message,
) -> None:
    """A field that is added later with a default can be left out by an older sender, and no other can."""
    header, *payload = codec.encode(message)
    values = msgpack.unpackb(header[2:], use_list=False)
    shorter = [header[:2] + msgpack.packb(values[:-1]), *payload]
    last = [item for item in dataclasses.fields(message) if item.name != "frames"][-1]
    if last.default is dataclasses.MISSING:
        with pytest.raises(WireError):
            codec.decode(shorter)
        return
    expected = dataclasses.replace(message, **{last.name: last.default})
    try:
        assert codec.decode(shorter) == expected
    except WireError:
        with pytest.raises(WireError):  # the default does not fit these frames: then it fails spelled out as well
            codec.decode(codec.encode(expected))
