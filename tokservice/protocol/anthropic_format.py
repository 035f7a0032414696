"""The responses of ``/v1/messages``, in the form of Anthropic's Messages API. Used by the detokenizer workers.

An answer is a list of blocks: text, thoughts, tool calls. In a stream each block is opened, grows and is closed;
which blocks there are depends on the parts of the answer alone, never on how they came.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import orjson

from tokservice.protocol.chat_message import call_id
from tokservice.protocol.context import Context
from tokservice.protocol.json_text import json_text, json_value
from tokservice.protocol.parts import Kind, Part, Piece, Usage, Whole
from tokservice.wire.errors import RequestError, sse_error
from tokservice.wire.messages import FinishReason, Route

_GROWS = {Kind.CONTENT: "text", Kind.REASONING: "thinking"}  # this field of a block
_DELTAS = {  # the beginning of the object that tells of it
    Kind.CONTENT: b'{"type":"text_delta","text":',
    Kind.REASONING: b'{"type":"thinking_delta","thinking":',
    Kind.ARGUMENTS: b'{"type":"input_json_delta","partial_json":',
}
_SIGNATURE_BYTES = 16
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessagesFormat:
    """See ``responses.ResponseFormat``. There is one choice."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.num_kept = 0  # see ResponseFormat
        self._num_blocks = 0  # opened so far
        self._open: Kind | None = None  # what the open block is: CONTENT, REASONING or CALL
        self._last = Piece()  # the one that ended the choice
        self._whole = Whole()  # of a plain response
        self._more: dict[str, Any] = orjson.loads(context.more_fields)

    def delta(self, choice: int, text: str) -> bytes:
        """See ResponseFormat. The block is open: it began with the first event."""
        return self._delta(Kind.CONTENT, json_text(text))

    def event(self, choice: int, piece: Piece, *, first: bool, usage: Usage) -> list[bytes]:
        """See ResponseFormat."""
        events = []
        if first:
            start = usage._replace(num_output_tokens=0)
            message = {**self._opening(), "content": [], **_stop(Piece()), "usage": _whole_usage(start)}
            events += [_event("message_start", {"message": message}), _PING]
        events += map(self._part, piece.parts)
        if piece.finish:
            self._last = piece
            events.append(self._close())
        return events

    def closing(self, usage: Usage) -> list[bytes]:
        """See ResponseFormat."""
        ended = {"delta": _stop(self._last), "usage": _usage(usage), **self._more}
        return [_event("message_delta", ended), _event("message_stop", {})]

    def failure(self, error: RequestError) -> list[bytes]:
        """See ResponseFormat."""
        return [sse_error(error, Route.MESSAGES)]

    def keep(self, choice: int, piece: Piece) -> None:
        """See ResponseFormat."""
        self.num_kept += self._whole.add(piece)

    def body(self, usage: Usage) -> list[bytes]:
        """See ResponseFormat."""
        blocks = _blocks(self._context, [passage.part for passage in self._whole.passages])
        ended = {**_stop(self._whole), "usage": _whole_usage(usage), **self._more}
        return [json_value({**self._opening(), "content": blocks, **ended})]

    def _opening(self) -> dict[str, Any]:
        """The fields of a message before its content."""
        message = {"id": self._context.response_id, "type": "message", "role": "assistant"}
        return {**message, "model": self._context.model}

    def _part(self, part: Part) -> bytes:
        opening = b""
        kind = Kind.CALL if part.kind == Kind.ARGUMENTS else part.kind
        if kind != self._open or part.kind == Kind.CALL:
            opening = self._close()
            block = {"index": self._num_blocks, "content_block": _block(self._context, part)}
            opening += _event("content_block_start", block)
            self._open = kind
            self._num_blocks += 1
        if part.kind == Kind.CALL or _is_omitted(self._context, part):
            return opening
        return opening + self._delta(part.kind, json_text(part.text))

    def _delta(self, kind: Kind, text: bytes) -> bytes:
        return (b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b%b}}\n\n') % (
            self._num_blocks - 1,
            _DELTAS[kind],
            text,
        )

    def _close(self) -> bytes:
        kind, self._open = self._open, None
        if kind is None:
            return b""
        place = {"index": self._num_blocks - 1}
        signature = b""
        if kind == Kind.REASONING:
            delta = {"type": "signature_delta", "signature": _signature(self._context, self._num_blocks - 1)}
            signature = _event("content_block_delta", {**place, "delta": delta})
        return signature + _event("content_block_stop", place)


def _blocks(context: Context, parts: Iterable[Part]) -> list[dict[str, Any]]:
    """The blocks of a whole answer."""
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for part in parts:
        if part.kind == Kind.ARGUMENTS:
            arguments += part.text
            blocks[-1]["input"] = _object(arguments)
            continue
        block = _block(context, part)
        if part.kind == Kind.CALL or not blocks or blocks[-1]["type"] != block["type"]:
            blocks.append(block)
            arguments = ""
            if part.kind == Kind.REASONING:
                block["signature"] = _signature(context, len(blocks) - 1)
        if part.kind != Kind.CALL and not _is_omitted(context, part):
            blocks[-1][_GROWS[part.kind]] += part.text
    return blocks


def _is_omitted(context: Context, part: Part) -> bool:
    return context.omits_thoughts and part.kind == Kind.REASONING


def _signature(context: Context, block: int) -> str:
    """Clients that see none do not send thoughts back; the same from any worker, and never verified."""
    name = f"{context.response_id}/{block}".encode()
    return hashlib.blake2b(name, digest_size=_SIGNATURE_BYTES).hexdigest()


def _block(context: Context, part: Part) -> dict[str, Any]:
    """The block that a part opens, still empty."""
    match part.kind:
        case Kind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Kind.CALL:
            return {"type": "tool_use", "id": call_id(context, 0, part.call), "name": part.text, "input": {}}
    return {"type": "text", "text": ""}


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call; none where the end of the answer cut them off."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _stop(piece: Piece | Whole) -> dict[str, Any]:
    """Why the message ended: nulls where it has not."""
    reason = None
    match piece.finish:
        case FinishReason.LENGTH:
            reason = "max_tokens"
        case FinishReason.STOP if piece.stop_string:
            reason = "stop_sequence"
        case FinishReason.STOP:
            reason = "tool_use" if piece.calls_tools else "end_turn"
    return {"stop_reason": reason, "stop_sequence": piece.stop_string or None}


def _usage(usage: Usage) -> dict[str, Any]:
    """``usage``: here the tokens found in the cache do not count as input."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
    }


def _whole_usage(usage: Usage) -> dict[str, Any]:
    """The same in a message."""
    return {**_usage(usage), "service_tier": "standard"}


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json_value({"type": kind, **fields}))
