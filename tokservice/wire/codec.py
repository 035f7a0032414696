"""Messages to ZMQ frames and back. Pure: no sockets.

The first frame is the header: one byte wire version, one byte tag, then the fields as a msgpack array; the
payload frames follow untouched. ``decode`` checks version, tag, number and types of the fields, that the
payload fits what the header says, and that no value would lead a receiver astray (a choice to make room for, a
member of an enum); whatever the bytes, it raises nothing but WireError.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgpack

from tokservice.wire.errors import WireError
from tokservice.wire.messages import (
    ALL_CHOICES,
    TAGS,
    WIRE_VERSION,
    Abort,
    Accepted,
    Answered,
    Begin,
    BodyChunk,
    Buffer,
    EngineLimits,
    EngineOutputs,
    FinishReason,
    Frames,
    Generate,
    Hello,
    Message,
    Metric,
    Peer,
    Prepare,
    Progress,
    PromptLogprobs,
    Publish,
    ReadyBytes,
    Rejected,
    Role,
    Route,
    SamplingParams,
    Submit,
    Undelivered,
)

MAX_HEADER_BYTES = 4 * 1024 * 1024
MAX_CHUNK_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 63 * 1024 * 1024  # of a plain response: an outbox (channels.py) has room for one
MAX_FRAMES = 1 << 16
MAX_ROWS = 1 << 16  # of one list in a header
MAX_CHOICES = 1 << 16  # of one request: each has a frame of its own where a request is begun again
TOKEN_BYTES = 4

Part = TypeVar("Part")


def encode(message: Message) -> list[Buffer]:
    """Frames of a message: the header, then the payload frames as they are."""
    values, payload = _WRITERS[type(message)](message)
    return [_PREFIXES[type(message)] + msgpack.packb(values, default=_values), *payload]


def decode(frames: Sequence[Buffer]) -> Message:
    """The message in frames (without routing id). Payload frames are kept as they are. Raises WireError."""
    if not frames or len(frames) > MAX_FRAMES:
        raise WireError(f"a message of {len(frames)} frames")
    if not 2 <= len(frames[0]) <= MAX_HEADER_BYTES:
        raise WireError(f"a header of {len(frames[0])} bytes")
    header = _bytes(frames[0])
    if header[0] != WIRE_VERSION:
        raise WireError(f"wire version {header[0]}, expected {WIRE_VERSION}")
    reader = _READERS.get(header[1])
    if reader is None:
        raise WireError(f"unknown tag {header[1]}")
    message: Message = reader(_unpack(header[2:]), frames[1:])
    return message


def encode_part(part: Any) -> bytes:
    """A dataclass that is no message (SamplingParams) as one frame."""
    packed: bytes = msgpack.packb(part, default=_values)
    return packed


def decode_part(kind: type[Part], frame: Buffer) -> Part:
    """The inverse of ``encode_part``. Raises WireError."""
    if len(frame) > MAX_HEADER_BYTES:
        raise WireError(f"{kind.__name__}: {len(frame)} bytes")
    part: Part = _reader_of(kind)(_unpack(_bytes(frame)), kind.__name__)
    return part


def _values(part: Any) -> tuple[Any, ...]:
    """The fields of a dataclass, for msgpack to write; ``dataclasses.astuple`` would copy them deeply."""
    values: tuple[Any, ...] = _PART_VALUES[type(part)](part)
    return values


# --- checks of values against annotations ---------------------------------------------------------------------

Reader = Callable[[Any, str], Any]


def _bytes(frame: Buffer) -> bytes:
    return frame if isinstance(frame, bytes) else bytes(memoryview(frame))


def _unpack(packed: bytes) -> Any:
    try:
        return msgpack.unpackb(packed, use_list=False, max_array_len=MAX_ROWS, max_map_len=0, max_ext_len=0)
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"malformed header: {type(error).__name__}") from error


def _exactly(kind: type) -> Reader:
    def read(value: Any, where: str) -> Any:
        if type(value) is not kind:
            raise WireError(f"{where}: expected {kind.__name__}, got {type(value).__name__}")
        return value

    return read


def _float(value: Any, where: str) -> float:
    if type(value) not in (float, int):
        raise WireError(f"{where}: expected float, got {type(value).__name__}")
    return float(value)


def _tuple_of(kind: Any) -> Reader:
    read_item = _reader_of(kind)
    only = {kind} if kind in (int, str) else None

    def read(value: Any, where: str) -> Any:
        if type(value) is not tuple:
            raise WireError(f"{where}: expected a list, got {type(value).__name__}")
        if only is not None:
            if value and set(map(type, value)) != only:
                raise WireError(f"{where}: expected only {kind.__name__}")
            return value
        return tuple(read_item(item, where) for item in value)

    return read


def _reader_of(kind: Any) -> Reader:
    if kind is float:
        return _float
    if kind in (int, str, bool):
        return _exactly(kind)
    if typing.get_origin(kind) is tuple:
        return _tuple_of(typing.get_args(kind)[0])
    if dataclasses.is_dataclass(kind):
        return _struct_reader(typing.cast("type", kind))
    raise TypeError(f"no wire form for {kind}")


@functools.cache  # resolving the annotations costs a quarter of a millisecond, and decode_part asks every time
def _struct_reader(kind: type, skip: str = "") -> Reader:
    hints = typing.get_type_hints(kind)
    fields = [item for item in dataclasses.fields(kind) if item.name != skip]
    readers = [(_reader_of(hints[item.name]), f"{kind.__name__}.{item.name}") for item in fields]
    num_required = sum(
        item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING for item in fields
    )

    def read(values: Any, where: str) -> Any:
        if type(values) is not tuple or not num_required <= len(values) <= len(readers):
            raise WireError(f"{where}: wrong number of fields")
        return kind(*[reader(value, name) for value, (reader, name) in zip(values, readers, strict=False)])

    return read


def _message_reader(kind: type) -> Callable[[Any, Sequence[Buffer]], Any]:
    read_fields = _struct_reader(kind, skip="frames")
    has_frames = any(item.name == "frames" for item in dataclasses.fields(kind))
    check = _RULES.get(kind)

    def read(values: Any, frames: Sequence[Buffer]) -> Any:
        message = read_fields(values, kind.__name__)
        if has_frames:
            object.__setattr__(message, "frames", tuple(frames))
        elif frames:
            raise WireError(f"{kind.__name__}: unexpected payload")
        if check is not None and not check(message):
            raise WireError(f"{kind.__name__}: values out of range, or a payload that does not fit the header")
        return message

    return read


def _message_writer(kind: type) -> Callable[[Any], tuple[tuple[Any, ...], Frames]]:
    names = [item.name for item in dataclasses.fields(kind) if item.name != "frames"]
    has_frames = any(item.name == "frames" for item in dataclasses.fields(kind))

    def write(message: Any) -> tuple[tuple[Any, ...], Frames]:
        return tuple([getattr(message, name) for name in names]), message.frames if has_frames else ()

    return write


# --- what each message must look like beyond its types --------------------------------------------------------

_ROUTES = frozenset(Route)
_FINISH_REASONS = frozenset(FinishReason)
_LABELS: dict[int, str] = {role: role.label for role in Role}
_IDENTITY = re.compile(r"(?P<label>[a-z]+)\.[0-9]{1,9}\.[0-9]{1,9}")


def _submit(message: Submit) -> bool:
    return message.route in _ROUTES and _are_chunks(message)


def _are_chunks(message: Submit | BodyChunk) -> bool:
    return all(len(frame) <= MAX_CHUNK_BYTES for frame in message.frames)


def _abort(message: Abort) -> bool:
    return ALL_CHOICES <= message.choice < MAX_CHOICES


def _one_frame(message: Rejected | Answered | Publish) -> bool:
    return len(message.frames) == 1


def _are_ids(frames: Frames) -> bool:
    return all(len(frame) % TOKEN_BYTES == 0 for frame in frames)


def _accepted(message: Accepted) -> bool:
    fits = len(message.frames) >= 3 and 1 <= message.num_choices <= MAX_CHOICES
    return fits and message.num_prompt_tokens >= 0 and _are_ids(message.frames[2:])


def _generate(message: Generate) -> bool:
    first_output = 2 + message.num_prompts
    prompts = message.frames[2:first_output]
    if not 1 <= message.num_prompts == len(prompts) or not _are_ids(prompts):
        return False
    return _continues(message, message.frames[first_output:])


def _begin(message: Begin) -> bool:
    return len(message.frames) >= 1 and _continues(message, message.frames[1:])


def _continues(message: Generate | Begin, frames: Frames) -> bool:
    """What was delivered is a part of what was produced, for each choice of an earlier attempt."""
    num_choices = len(message.num_delivered)
    if len(message.finished) != num_choices or not _are_reasons(message.finished):
        return False
    outputs = frames[:num_choices]
    if len(frames) != num_choices * (2 if message.has_notes else 1) or not _are_ids(outputs):
        return False
    rows = zip(message.num_delivered, outputs, strict=True)
    return all(0 <= delivered <= len(ids) // TOKEN_BYTES for delivered, ids in rows)


def _are_reasons(column: tuple[int, ...]) -> bool:
    return _FINISH_REASONS.issuperset(column)


def _are_choices(column: tuple[int, ...]) -> bool:
    return min(column, default=0) >= 0 and max(column, default=0) < MAX_CHOICES


def _same_length(*columns: tuple[Any, ...]) -> bool:
    return len({len(column) for column in columns}) == 1


def _none_below(low: int, *columns: tuple[int, ...]) -> bool:
    return all(min(column, default=low) >= low for column in columns)


def _engine_outputs(message: EngineOutputs) -> bool:
    columns = [message.request_ids, message.attempts, message.choices, message.num_tokens, message.finish_reasons]
    columns += [column for column in (message.num_top, message.num_cached_tokens) if column]
    if not _same_length(*columns) or not _none_below(0, message.num_tokens, message.num_cached_tokens):
        return False
    if not _are_choices(message.choices) or not _are_reasons(message.finish_reasons):
        return False
    sizes = [sum(message.num_tokens) * TOKEN_BYTES]
    if message.num_top:
        if not _none_below(-1, message.num_top):
            return False
        rows = zip(message.num_tokens, message.num_top, strict=True)
        sizes += [sum(tokens * (1 + top) for tokens, top in rows) * TOKEN_BYTES] * 2
    return [len(frame) for frame in message.frames] == sizes


def _prompt_logprobs(message: PromptLogprobs) -> bool:
    if len(message.frames) != 2 or not 0 <= message.choice < MAX_CHOICES or message.num_top < 0:
        return False
    size, row_bytes = len(message.frames[0]), (1 + message.num_top) * TOKEN_BYTES
    return size == len(message.frames[1]) and size % row_bytes == 0


def _progress(message: Progress) -> bool:
    columns = (message.request_ids, message.attempts, message.choices, message.num_tokens, message.finish_reasons)
    if not _same_length(*columns, message.statuses, message.flags, message.num_bytes):
        return False
    if not _none_below(0, message.num_tokens, message.num_bytes):
        return False
    if not _are_choices(message.choices) or not _are_reasons(message.finish_reasons):
        return False
    sizes = [sum(message.num_tokens) * TOKEN_BYTES, sum(message.num_bytes)]
    if message.num_note_bytes:
        if not _same_length(message.num_bytes, message.num_note_bytes) or not _none_below(0, message.num_note_bytes):
            return False
        sizes.append(sum(message.num_note_bytes))
    return [len(frame) for frame in message.frames] == sizes


def _ready_bytes(message: ReadyBytes) -> bool:
    if not _same_length(message.request_ids, message.statuses, message.flags, message.num_bytes):
        return False
    fits = len(message.frames) == 1 and _none_below(0, message.num_bytes)
    return fits and len(message.frames[0]) == sum(message.num_bytes)


def _prepare(message: Prepare) -> bool:
    return message.attempt >= 1 and message.route in _ROUTES


def _undelivered(message: Undelivered) -> bool:
    return _same_length(message.request_ids, message.attempts)


def _hello(message: Hello) -> bool:
    match = _IDENTITY.fullmatch(message.identity)
    return match is not None and _LABELS.get(message.role) == match["label"] and message.capacity >= 0


_RULES: dict[type, Callable[[Any], bool]] = {
    Submit: _submit,
    BodyChunk: _are_chunks,
    Abort: _abort,
    Prepare: _prepare,
    Accepted: _accepted,
    Rejected: _one_frame,
    Answered: _one_frame,
    Generate: _generate,
    Undelivered: _undelivered,
    Begin: _begin,
    EngineOutputs: _engine_outputs,
    PromptLogprobs: _prompt_logprobs,
    Progress: _progress,
    ReadyBytes: _ready_bytes,
    Hello: _hello,
    Publish: _one_frame,
}

_READERS = {tag: _message_reader(kind) for tag, kind in TAGS.items()}
_WRITERS = {kind: _message_writer(kind) for kind in TAGS.values()}
_PART_VALUES = {
    kind: operator.attrgetter(*[item.name for item in dataclasses.fields(kind)])
    for kind in (EngineLimits, SamplingParams, Peer, Metric)
}
_PREFIXES = {kind: bytes((WIRE_VERSION, tag)) for tag, kind in TAGS.items()}
