"""The responses of ``/v1/responses``, in the form of OpenAI's Responses API. Used by the detokenizer workers.

An answer is a list of items: messages, thoughts, tool calls. In a stream each item is added, grows and is done; which
items there are depends on the parts of the answer alone. Events are numbered, and each part makes one, so the parts
have to come one token at a time: then the numbers follow from the token ids too.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from tokservice.protocol.chat_message import call_id
from tokservice.protocol.context import Context
from tokservice.protocol.growing_json import JsonList, JsonString
from tokservice.protocol.json_text import json_value
from tokservice.protocol.logprobs import text_logprob
from tokservice.protocol.parts import CALLS, Kind, Part, Piece, Usage
from tokservice.protocol.tools import SEPARATOR
from tokservice.wire.errors import RequestError
from tokservice.wire.messages import FinishReason

_PREFIXES = {Kind.CONTENT: "msg", Kind.REASONING: "rs", Kind.CALL: "fc", Kind.CUSTOM_CALL: "ctc"}  # of an item's id
_CALL_TYPES = {Kind.CALL: ("function_call", b"arguments"), Kind.CUSTOM_CALL: ("custom_tool_call", b"input")}
_GROWING = {Kind.ARGUMENTS: Kind.CALL, Kind.INPUT: Kind.CUSTOM_CALL}
_EVENTS = {  # an item's text grows by the one and is complete with the other; it is the field named here
    Kind.CONTENT: (b"response.output_text.delta", b"response.output_text.done", b"text"),
    Kind.REASONING: (b"response.reasoning_text.delta", b"response.reasoning_text.done", b"text"),
    Kind.CALL: (b"response.function_call_arguments.delta", b"response.function_call_arguments.done", b"arguments"),
    Kind.CUSTOM_CALL: (b"response.custom_tool_call_input.delta", b"response.custom_tool_call_input.done", b"input"),
}
_END = b"}\n\n"  # of an event


@dataclass(slots=True)
class _Item:
    """The item that is growing."""

    kind: Kind  # CONTENT, REASONING, CALL or CUSTOM_CALL
    id: str
    place: bytes  # the fields that name it in events
    call: dict[str, Any]  # call_id, name and namespace, of a call
    text: JsonString = field(default_factory=JsonString)
    logprobs: JsonList = field(default_factory=JsonList)

    def part(self) -> list[bytes]:
        """What its content holds, in pieces; of a call there is none."""
        if self.kind == Kind.REASONING:
            return [b'{"type":"reasoning_text","text":', *self.text, b"}"]
        return [b'{"type":"output_text","text":', *self.text, b',"annotations":[],"logprobs":', *self.logprobs, b"}"]

    def shown(self, status: str) -> list[bytes]:
        """As clients read it, in pieces; while it is in progress its content has not been told."""
        ending = b',"status":"%b"}' % status.encode()
        fields: dict[str, Any] = {"type": "message", "id": self.id, "role": "assistant"}
        if self.kind in CALLS:
            kind, grows = _CALL_TYPES[self.kind]
            fields = {"type": kind, "id": self.id, **self.call}
            return [json_value(fields)[:-1], b',"%b":' % grows, *self.text, ending]
        if self.kind == Kind.REASONING:
            fields = {"type": "reasoning", "id": self.id, "summary": []}
        content = [] if status == "in_progress" else self.part()
        return [json_value(fields)[:-1], b',"content":[', *content, b"]", ending]


class ResponsesApiFormat:
    """See ``responses.ResponseFormat``. There is one choice."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.num_kept = 0  # see ResponseFormat
        self._num_events = 0
        self._output: list[list[bytes]] = []  # the items that are done, each in pieces
        self._open: _Item | None = None
        self._untold = JsonList()  # logprobs of tokens whose item is not there yet
        self._last = Piece()  # the latest of the choice

    def delta(self, choice: int, text: str) -> bytes:
        """See ResponseFormat. The message is open: it began with the first event."""
        assert self._open is not None
        return self._delta(self._open, text, b"[]")

    def event(self, choice: int, piece: Piece, *, first: bool, usage: Usage) -> list[bytes]:
        """See ResponseFormat."""
        self._last = piece
        events = self._opening() if first else []
        self._untold.extend(list(map(text_logprob, piece.tokens)))
        for part in piece.parts:
            events += self._part(part)
        if self._open is not None:
            self._open.logprobs.join(self._take_untold())  # of tokens without text
        if piece.finish:
            events += self._close("incomplete" if piece.finish == FinishReason.LENGTH else "completed")
        return events

    def closing(self, usage: Usage) -> list[bytes]:
        """See ResponseFormat."""
        status = self._status()
        return self._event(b"response.%b" % status.encode(), b'"response":', self._response(status, usage))

    def failure(self, error: RequestError) -> list[bytes]:
        """See ResponseFormat."""
        opening = [] if self._num_events else self._opening()
        return opening + self._event(b"response.failed", b'"response":', self._response("failed", error=error))

    def keep(self, choice: int, piece: Piece) -> None:
        """See ResponseFormat. It is what the events of a stream add up to."""
        self.event(choice, piece, first=not self._num_events, usage=Usage(0, 0, 0))

    def body(self, usage: Usage) -> list[bytes]:
        """See ResponseFormat."""
        return self._response(self._status(), usage)

    # --- the response

    def _status(self) -> str:
        """How it ended."""
        return "incomplete" if self._last.finish == FinishReason.LENGTH else "completed"

    def _opening(self) -> list[bytes]:
        response = self._response("in_progress")
        created = self._event(b"response.created", b'"response":', response)
        return created + self._event(b"response.in_progress", b'"response":', response)

    def _response(self, status: str, usage: Usage | None = None, error: RequestError | None = None) -> list[bytes]:
        before = {
            "id": self._context.response_id,
            "object": "response",
            "created_at": self._context.created,
            "status": status,
            "error": error and {"code": _failure_code(error), "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._context.model,
        }
        response = [json_value(before)[:-1], b',"output":[']
        for place, item in enumerate(self._output):
            response += [b",", *item] if place else item
        return [*response, b'],"usage":%b,' % json_value(usage and self._usage(usage)), self._context.more_fields[1:]]

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
            "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        }

    # --- items

    def _part(self, part: Part) -> list[bytes]:
        kind = _GROWING.get(part.kind, part.kind)
        item, events = self._open, []
        if item is None or kind != item.kind or part.kind in CALLS:
            events = self._close("completed")
            item = self._open = self._new_item(kind, part)
            events += self._added(item)
        return events if part.kind in CALLS else [*events, self._delta(item, part.text, self._take_untold())]

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

    def _added(self, item: _Item) -> list[bytes]:
        added = self._about_item(b"response.output_item.added", item.shown("in_progress"))
        if item.kind in CALLS:
            return added
        return added + self._event(b"response.content_part.added", item.place + b',"part":', item.part())

    def _delta(self, item: _Item, text: str, logprobs: bytes) -> bytes:
        told = item.text.add(text)
        item.logprobs.join(logprobs)
        self.num_kept += len(told) + len(logprobs)
        fields = item.place + b',"delta":' + told
        if item.kind == Kind.CONTENT:
            fields += b',"logprobs":' + logprobs
        return self._begin_event(_EVENTS[item.kind][0], fields) + _END

    def _take_untold(self) -> bytes:
        if not len(self._untold):
            return b"[]"
        untold, self._untold = self._untold, JsonList()
        return b"".join(untold)

    def _close(self, status: str) -> list[bytes]:
        """The open item, if there is one, is done."""
        item, self._open = self._open, None
        if item is None:
            return []
        _, done, name = _EVENTS[item.kind]
        logprobs = [b',"logprobs":', *item.logprobs] if item.kind == Kind.CONTENT else []
        events = self._event(done, b'%b,"%b":' % (item.place, name), [*item.text, *logprobs])
        if item.kind not in CALLS:
            events += self._event(b"response.content_part.done", item.place + b',"part":', item.part())
        shown = item.shown(status)
        events += self._about_item(b"response.output_item.done", shown)
        self._output.append(shown)
        return events

    # --- events

    def _about_item(self, kind: bytes, item: list[bytes]) -> list[bytes]:
        index = len(self._output)  # an item that is not done is the next
        return self._event(kind, b'"output_index":%d,"item":' % index, item)

    def _event(self, kind: bytes, fields: bytes, more: list[bytes]) -> list[bytes]:
        return [self._begin_event(kind, fields), *more, _END]

    def _begin_event(self, kind: bytes, fields: bytes) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b' % (kind, kind, number, fields)


def _failure_code(error: RequestError) -> str:
    """One of those that the API knows."""
    return "server_error" if error.status >= 500 else "invalid_prompt"
