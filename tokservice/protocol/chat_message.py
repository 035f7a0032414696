"""The assistant's message, whole or as the delta of an event. Used by the detokenizer workers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from tokservice.protocol.context import Context
from tokservice.protocol.growing_json import one_string
from tokservice.protocol.json_text import json_text, json_value
from tokservice.protocol.parts import CALLS, Kind, Part, Passage, Piece

SHORT_ID_FORMAT = "mistral"  # its templates take ids of nine letters and digits alone
_CALL_FIELDS = {  # what a call is, and which field of it grows
    Kind.CALL: ("function", "arguments"),
    Kind.ARGUMENTS: ("function", "arguments"),
    Kind.CUSTOM_CALL: ("custom", "input"),
    Kind.INPUT: ("custom", "input"),
}


def message_delta(context: Context, choice: int, piece: Piece, *, first: bool) -> bytes:
    """What an event adds to the message of a choice."""
    role = b'"role":"assistant"' if first else b""
    if all(part.kind == Kind.CONTENT for part in piece.parts):
        text = piece.text
        if not (text or first):
            return b"{}"
        return b"{%b%b" % (role, b"," if first else b"") + b'"content":' + json_text(text) + b"}"
    delta: dict[str, Any] = {"role": "assistant", "content": None} if first else {}
    for part in piece.parts:
        match part.kind:
            case Kind.CONTENT:
                delta["content"] = (delta.get("content") or "") + part.text
            case Kind.REASONING:
                delta["reasoning_content"] = delta.get("reasoning_content", "") + part.text
    if calls := _call_deltas(context, choice, piece.parts):
        delta["tool_calls"] = calls
    return json_value(delta)


def whole_message(context: Context, choice: int, passages: Sequence[Passage]) -> list[bytes]:
    """The message of a choice, in pieces. Its content is null where tool calls, or thoughts alone, take its place."""
    texts = {
        kind: [passage.text for passage in passages if passage.kind == kind and len(passage.text)]
        for kind in (Kind.CONTENT, Kind.REASONING)
    }
    calls = _call_deltas(context, choice, [passage.part for passage in passages if passage.kind not in texts])
    has_content = texts[Kind.CONTENT] or not (texts[Kind.REASONING] or calls)
    message = [b'{"role":"assistant","content":']
    message += one_string(texts[Kind.CONTENT]) if has_content else [b"null"]
    message.append(b',"refusal":null,"annotations":[]')
    if context.reasoning:
        message.append(b',"reasoning_content":')
        message += one_string(texts[Kind.REASONING]) if texts[Kind.REASONING] else [b"null"]
    if calls:
        shown = [json_value({key: value for key, value in call.items() if key != "index"}) for call in calls]
        message.append(b',"tool_calls":[' + b",".join(shown) + b"]")
    return [*message, b"}"]


def call_id(context: Context, choice: int, call: int) -> str:
    """The id of a tool call: the same from any worker that writes this response."""
    digest = hashlib.blake2b(f"{context.response_id}/{choice}/{call}".encode()).hexdigest()
    return digest[:9] if context.tool_format == SHORT_ID_FORMAT else f"call_{digest[:24]}"


def _call_deltas(context: Context, choice: int, parts: Sequence[Part]) -> list[dict[str, Any]]:
    """An entry for each tool call that the parts touch."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if part.kind not in _CALL_FIELDS:
            continue
        kind, grows = _CALL_FIELDS[part.kind]
        if part.kind in CALLS:
            identity = {"index": part.call, "id": call_id(context, choice, part.call), "type": kind}
            calls[part.call] = identity | {kind: {"name": part.text, grows: ""}}
        else:
            entry = calls.setdefault(part.call, {"index": part.call, kind: {grows: ""}})
            entry[kind][grows] += part.text
    return list(calls.values())
