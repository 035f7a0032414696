"""The types that read bodies, as types that JSON Schema can express. Used by the API's description alone.

``Raw`` parts say nothing of what is in them, and a default that is ``Raw`` has no schema: the described types have any
value in their place, and for what is not supported the few values that are let through.
"""

from __future__ import annotations

import typing
from functools import cache
from types import UnionType
from typing import Annotated, Any

import msgspec
from msgspec import Raw

from tokservice.protocol.bounds import Bounds
from tokservice.protocol.reading import Neutral
from tokservice.protocol.requests import Message
from tokservice.protocol.responses_api_requests import Item, MessageItem, ResponsesBody


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content; the texts are joined."""

    text: str
    type: typing.Literal["text"]
    cache_control: Any = None  # bookkeeping of the client, as is the next
    prompt_cache_breakpoint: Any = None


# What is read by other means than its type.
_PRECISE: dict[tuple[type, str], Any] = {
    (Message, "content"): str | list[TextPart] | None,
    (ResponsesBody, "input"): str | list[Item],
}
# Read by hand too, so that the type may be left out, though it tells the members of a union apart.
UNTYPED: tuple[type[msgspec.Struct], ...] = (MessageItem,)


@cache
def described(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A type of the same name that has a schema."""
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for field in msgspec.structs.fields(kind):
        hint = _described(_PRECISE.get((kind, field.name), field.type))
        if field.required:
            fields.append((field.encode_name, hint))
        else:
            default = None if isinstance(field.default, Raw) else field.default
            fields.append((field.encode_name, hint, default))
    config = kind.__struct_config__
    return msgspec.defstruct(
        kind.__name__,
        fields,
        namespace={"__doc__": kind.__doc__},
        forbid_unknown_fields=config.forbid_unknown_fields,
        kw_only=True,
        tag_field=config.tag_field,
        tag=config.tag,
    )


def _described(hint: Any) -> Any:
    if hint is Raw:
        return Any
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return described(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        if arguments[0] is Raw:
            return _unsupported(hint)
        (bounds,) = (note for note in hint.__metadata__ if isinstance(note, Bounds))
        return Annotated[arguments[0], bounds.meta]
    if origin is None or origin is typing.Literal:
        return hint
    arguments = tuple(map(_described, arguments))
    return typing.Union[arguments] if origin in (UnionType, typing.Union) else origin[arguments]  # noqa: UP007


def _unsupported(hint: Any) -> Any:
    (neutral,) = (note for note in hint.__metadata__ if isinstance(note, Neutral))
    schema = {"enum": list(neutral.values)}
    return Annotated[Any, msgspec.Meta(description="Not supported.", extra_json_schema=schema)]
