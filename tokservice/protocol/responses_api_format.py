"""The responses of ``/v1/responses``, in the form of OpenAI's Responses API. Used by the detokenizer workers.

An answer is a list of items: messages, thoughts, tool calls. In a stream each item is added, grows and is done; which
items there are depends on the parts of the answer alone. Events are numbered, and each part makes one, so the parts
have to come one token at a time: then the numbers follow from the token ids too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokservice.protocol.chat_message import call_id
from tokservice.protocol.context import Context
from tokservice.protocol.json_text import json_text, json_value
from tokservice.protocol.logprobs import text_logprobs
from tokservice.protocol.parts import CALLS, Kind, Part, Piece, Usage
from tokservice.protocol.tools import SEPARATOR
from tokservice.wire.errors import RequestError
from tokservice.wire.messages import FinishReason

_PREFIXES = {Kind.CONTENT: "msg", Kind.REASONING: "rs", Kind.CALL: "fc", Kind.CUSTOM_CALL: "ctc"}  # of an item's id
_CALL_TYPES = {Kind.CALL: ("function_call", "arguments"), Kind.CUSTOM_CALL: ("custom_tool_call", "input")}
_GROWING = {Kind.ARGUMENTS: Kind.CALL, Kind.INPUT: Kind.CUSTOM_CALL}
_EVENTS = {  # an item's text grows by the one and is complete with the other; it is the field named here
    Kind.CONTENT: (b"response.output_text.delta", b"response.output_text.done", b"text"),
    Kind.REASONING: (b"response.reasoning_text.delta", b"response.reasoning_text.done", b"text"),
    Kind.CALL: (b"response.function_call_arguments.delta", b"response.function_call_arguments.done", b"arguments"),
    Kind.CUSTOM_CALL: (b"response.custom_tool_call_input.delta", b"response.custom_tool_call_input.done", b"input"),
}


@dataclass(slots=True)
class _Item:
    """The item that is growing."""

    kind: Kind  # CONTENT, REASONING, CALL or CUSTOM_CALL
    id: str
    place: bytes  # the fields that name it in events
    call: dict[str, Any]  # call_id, name and namespace, of a call
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.texts)

    @property
    def part(self) -> dict[str, Any]:
        """What its content holds; of a call there is none."""
        if self.kind == Kind.REASONING:
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def shown(self, status: str) -> dict[str, Any]:
        """As clients read it; while it is in progress its content has not been told."""
        content = [] if status == "in_progress" else [self.part]
        if self.kind == Kind.REASONING:
            return {"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status}
        if self.kind in CALLS:
            kind, grows = _CALL_TYPES[self.kind]
            return {"type": kind, "id": self.id, **self.call, grows: self.text, "status": status}
        return {"type": "message", "id": self.id, "role": "assistant", "content": content, "status": status}


class ResponsesApiFormat:
    """See ``responses.ResponseFormat``. There is one choice."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._num_events = 0
        self._output: list[dict[str, Any]] = []  # the items that are done
        self._open: _Item | None = None
        self._last = Piece()  # the latest of the choice

    def delta(self, choice: int, text: str) -> bytes:
        """See ResponseFormat. The message is open: it began with the first event."""
        assert self._open is not None
        return self._delta(self._open, text, [])

    def event(self, choice: int, piece: Piece, *, first: bool, usage: Usage) -> bytes:
        """See ResponseFormat."""
        self._last = piece
        events = [self._opening()] if first else []
        logprobs = text_logprobs(piece.tokens)
        for part in piece.parts:
            events.append(self._part(part, logprobs))
            logprobs = []
        if self._open is not None:
            self._open.logprobs += logprobs  # of tokens without text
        if piece.finish:
            events.append(self._close("incomplete" if piece.finish == FinishReason.LENGTH else "completed"))
        return b"".join(events)

    def closing(self, usage: Usage) -> bytes:
        """See ResponseFormat."""
        status = self._status()
        return self._event(b"response.%b" % status.encode(), b'"response":' + self._response(status, usage))

    def failure(self, error: RequestError) -> bytes:
        """See ResponseFormat."""
        opening = b"" if self._num_events else self._opening()
        return opening + self._event(b"response.failed", b'"response":' + self._response("failed", error=error))

    def body(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        """See ResponseFormat. It is what the events of a stream add up to."""
        (piece,) = pieces
        self.event(0, piece, first=True, usage=usage)
        return self._response(self._status(), usage)

    # --- the response

    def _status(self) -> str:
        """How it ended."""
        return "incomplete" if self._last.finish == FinishReason.LENGTH else "completed"

    def _opening(self) -> bytes:
        response = b'"response":' + self._response("in_progress")
        return self._event(b"response.created", response) + self._event(b"response.in_progress", response)

    def _response(self, status: str, usage: Usage | None = None, error: RequestError | None = None) -> bytes:
        fields = {
            "id": self._context.response_id,
            "object": "response",
            "created_at": self._context.created,
            "status": status,
            "error": error and {"code": _failure_code(error), "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._context.model,
            "output": self._output,
            "usage": usage and self._usage(usage),
        }
        return b"%b,%b" % (json_value(fields)[:-1], self._context.more_fields[1:])

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
            "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        }

    # --- items

    def _part(self, part: Part, logprobs: list[dict[str, Any]]) -> bytes:
        kind = _GROWING.get(part.kind, part.kind)
        item, events = self._open, b""
        if item is None or kind != item.kind or part.kind in CALLS:
            events = self._close("completed")
            item = self._open = self._new_item(kind, part)
            events += self._added(item)
        if part.kind in CALLS:
            return events
        return events + self._delta(item, part.text, logprobs)

    def _new_item(self, kind: Kind, part: Part) -> _Item:
        """The same from any worker that writes this response."""
        index = len(self._output)
        digest = hashlib.blake2b(f"{self._context.response_id}/{index}".encode(), digest_size=16).hexdigest()
        item_id = f"{_PREFIXES[kind]}_{digest}"
        place = b'"output_index":%d,"item_id":"%b"' % (index, item_id.encode())
        if kind in CALLS:
            call = {"call_id": call_id(self._context, 0, part.call), **self._name(part.text)}
            return _Item(kind, item_id, place, call)
        return _Item(kind, item_id, place + b',"content_index":0', {})

    def _name(self, whole: str) -> dict[str, str]:
        """A tool's name, and the namespace that it stands in."""
        namespace = self._context.namespaces.get(whole)
        if namespace is None:
            return {"name": whole}
        return {"name": whole.removeprefix(f"{namespace}{SEPARATOR}"), "namespace": namespace}

    def _added(self, item: _Item) -> bytes:
        added = self._about_item(b"response.output_item.added", item.shown("in_progress"))
        if item.kind in CALLS:
            return added
        part = item.place + b',"part":' + json_value(item.part)
        return added + self._event(b"response.content_part.added", part)

    def _delta(self, item: _Item, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        item.texts.append(text)
        item.logprobs += logprobs
        fields = item.place + b',"delta":' + json_text(text)
        if item.kind == Kind.CONTENT:
            fields += b',"logprobs":' + json_value(logprobs) if logprobs else b',"logprobs":[]'
        return self._event(_EVENTS[item.kind][0], fields)

    def _close(self, status: str) -> bytes:
        """The open item, if there is one, is done."""
        item, self._open = self._open, None
        if item is None:
            return b""
        _, done, name = _EVENTS[item.kind]
        text = b'%b,"%b":%b' % (item.place, name, json_text(item.text))
        if item.kind == Kind.CONTENT:
            text += b',"logprobs":' + json_value(item.logprobs)
        events = self._event(done, text)
        if item.kind not in CALLS:
            events += self._event(b"response.content_part.done", item.place + b',"part":' + json_value(item.part))
        shown = item.shown(status)
        events += self._about_item(b"response.output_item.done", shown)
        self._output.append(shown)
        return events

    # --- events

    def _about_item(self, kind: bytes, item: dict[str, Any]) -> bytes:
        index = len(self._output)  # an item that is not done is the next
        return self._event(kind, b'"output_index":%d,"item":%b' % (index, json_value(item)))

    def _event(self, kind: bytes, fields: bytes) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b}\n\n' % (kind, kind, number, fields)


def _failure_code(error: RequestError) -> str:
    """One of those that the API knows."""
    return "server_error" if error.status >= 500 else "invalid_prompt"
