"""Requests to the router, ready bytes back. API process."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from api.exchange import Exchange
from api.http_head import JSON
from tokservice.runtime.links import ROUTER_API_ENDPOINT
from tokservice.runtime.process import Process
from tokservice.wire.channels import Channel, LoopChannel, dealer
from tokservice.wire.errors import INTERNAL, NOT_READY, ROUTER_LOST, PeerLost, sse_error
from tokservice.wire.messages import (
    Abort,
    BodyChunk,
    Message,
    ReadyBytes,
    ReadyFlags,
    Role,
    Submit,
    Topology,
)

ROWS_PER_TURN = 32  # over all messages: a third of a millisecond
STREAM, LAST = int(ReadyFlags.STREAM), int(ReadyFlags.LAST)

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Line:
    """To one router."""

    router: str  # its identity
    raw: Channel
    channel: LoopChannel = field(init=False)
    open: dict[str, Exchange] = field(default_factory=dict)  # what was given to this router, by request id


class RouterClient:
    """The line to the living router, and the exchanges that are open on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, process: Process) -> None:
        self._loop = loop
        self._process = process
        self._line: _Line | None = None
        self._last_words: set[_Line] = set()  # of dead routers
        self._counter = itertools.count(1)
        self._paused: set[Exchange] = set()
        self.num_messages = 0
        self._num_rows = 0

    @property
    def num_open(self) -> int:
        """Requests that wait for their answer."""
        return sum(len(line.open) for line in self._lines())

    def follow(self, topology: Topology) -> None:
        """Connect to the router that the topology names; what an old one held is lost, but for its last words."""
        router = next((peer for peer in topology.peers if peer.role == Role.ROUTER), None)
        if router is not None and self._line is not None and router.identity == self._line.router:
            return
        if self._line is not None:
            line, self._line = self._line, None
            self._last_words.add(line)
            line.channel.finish(lambda: self._lose(line))
        if router is not None:
            endpoint = router.endpoints[ROUTER_API_ENDPOINT]
            raw = dealer(self._process.context, endpoint, self._process.identity, router.identity)
            line = self._line = _Line(router.identity, raw)
            line.channel = LoopChannel(
                self._loop, raw, lambda message: self._on_message(line, message), self._resume_uploads
            )
            self._process.watch(raw)

    def submit(self, exchange: Exchange, *, whole: bool) -> None:
        """Begin a request: with its body, or before that, so that a full server can refuse it."""
        exchange.request_id = f"{self._process.identity}:{next(self._counter)}"
        if self._line is None:
            exchange.respond_error(NOT_READY)
            return
        self._line.open[exchange.request_id] = exchange
        frames = exchange.kept.take() if whole else ()
        length, session = exchange.content_length, exchange.session
        message = Submit(exchange.request_id, exchange.route, length, whole, session, frames)
        self._send(self._line, exchange, message)

    def body_chunk(self, exchange: Exchange) -> None:
        """Send what is kept of its body."""
        frames = exchange.kept.take()
        if self._line is not None and exchange.request_id in self._line.open:
            self._send(self._line, exchange, BodyChunk(exchange.request_id, exchange.complete, frames))

    def abort(self, exchange: Exchange) -> None:
        """Its client has gone."""
        self._paused.discard(exchange)
        for line in self._lines():
            if line.open.pop(exchange.request_id, None) is not None and line is self._line:
                line.channel.send(Abort(exchange.request_id), always=True)

    def close(self) -> None:
        """Leave the router."""
        for line in self._lines():
            line.channel.close()
        self._line = None
        self._last_words.clear()

    def _lines(self) -> list[_Line]:
        return [*self._last_words, *([self._line] if self._line is not None else [])]

    def _send(self, line: _Line, exchange: Exchange, message: Message) -> None:
        try:
            line.channel.send(message)
        except PeerLost as lost:
            log.error("router is too far behind: %s", lost)
            self.abort(exchange)  # a body with a piece missing must not be used
            exchange.respond_error(INTERNAL)
            return
        if line.channel.is_behind and not exchange.complete:
            self._paused.add(exchange)
            exchange.line.pause_upload(True)

    def _resume_uploads(self) -> None:
        paused, self._paused = self._paused, set()
        for exchange in paused:
            exchange.line.pause_upload(False)

    def _lose(self, line: _Line) -> None:
        self._last_words.discard(line)
        self._process.unwatch(line.raw)
        lost, line.open = line.open, {}
        for exchange in lost.values():
            if exchange.started:
                exchange.send(sse_error(ROUTER_LOST, exchange.route), last=True)
            else:
                exchange.respond_error(ROUTER_LOST)
        self._resume_uploads()

    def _on_message(self, line: _Line, message: Message) -> Iterator[None] | None:
        self.num_messages += 1
        return self._deliver(line, message) if isinstance(message, ReadyBytes) else None

    def _deliver(self, line: _Line, message: ReadyBytes) -> Iterator[None]:
        """Write a batch out. It has a row for each stream; a turn of the loop takes so many and no more."""
        data = memoryview(message.frames[0])
        start = 0
        columns = zip(message.request_ids, message.statuses, message.flags, message.num_bytes, strict=True)
        for request_id, status, flags, num_bytes in columns:
            end = start + num_bytes
            exchange = line.open.pop(request_id, None) if flags & LAST else line.open.get(request_id)
            if exchange is None:
                pass  # its client has gone
            elif status and not flags & STREAM:
                exchange.respond(status, JSON, data[start:end])
            elif status or exchange.started:
                if status:
                    exchange.open_stream(status)
                exchange.send(data[start:end], last=bool(flags & LAST))
            else:
                log.error("the router sent a piece of a stream that it had not opened: request_id=%s", request_id)
                self.abort(exchange)
                exchange.respond_error(INTERNAL)
            start = end
            self._num_rows += 1
            if self._num_rows % ROWS_PER_TURN == 0:
                yield
