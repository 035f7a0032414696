"""Requests to the router, ready bytes back. API process."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator

from api.exchange import Exchange
from api.http_head import JSON
from tokservice.runtime.links import ROUTER_API_ENDPOINT
from tokservice.runtime.process import Process
from tokservice.wire.channels import LoopChannel, dealer
from tokservice.wire.errors import INTERNAL, NOT_READY, ROUTER_LOST, PeerLost, RequestError, sse_error
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


class RouterClient:
    """The open exchanges by request id, and the line to the living router."""

    def __init__(self, loop: asyncio.AbstractEventLoop, process: Process) -> None:
        self._loop = loop
        self._process = process
        self._line: LoopChannel | None = None
        self._router = ""
        self._counter = itertools.count(1)
        self._open: dict[str, Exchange] = {}
        self._paused: set[Exchange] = set()
        self.num_messages = 0
        self._num_rows = 0

    @property
    def num_open(self) -> int:
        """Requests that wait for their answer."""
        return len(self._open)

    def follow(self, topology: Topology) -> None:
        """Connect to the router that the topology names; what an old one held is lost."""
        router = next((peer for peer in topology.peers if peer.role == Role.ROUTER), None)
        if router is not None and router.identity == self._router:
            return
        if self._line is not None:
            self._line.close()
            self._line, self._router = None, ""
            self._fail_all(ROUTER_LOST)
        if router is not None:
            endpoint = router.endpoints[ROUTER_API_ENDPOINT]
            channel = dealer(self._process.context, endpoint, self._process.identity, router.identity)
            self._line = LoopChannel(self._loop, channel, self._on_message, self._resume_uploads)
            self._router = router.identity

    def submit(self, exchange: Exchange, body: bytes, *, complete: bool) -> None:
        """Begin a request, with the first piece of its body."""
        exchange.request_id = f"{self._process.identity}:{next(self._counter)}"
        if self._line is None:
            exchange.respond_error(NOT_READY)
            return
        self._open[exchange.request_id] = exchange
        frames = (body,) if body else ()
        self._send(exchange, Submit(exchange.request_id, exchange.route, exchange.content_length, complete, frames))

    def body_chunk(self, exchange: Exchange, data: bytes, *, complete: bool) -> None:
        """Send more of its body."""
        if exchange.request_id in self._open:
            self._send(exchange, BodyChunk(exchange.request_id, complete, (data,) if data else ()))

    def abort(self, exchange: Exchange) -> None:
        """Its client has gone."""
        self._paused.discard(exchange)
        if self._open.pop(exchange.request_id, None) is not None and self._line is not None:
            self._line.send(Abort(exchange.request_id), always=True)

    def close(self) -> None:
        """Leave the router."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def _send(self, exchange: Exchange, message: Message) -> None:
        assert self._line is not None
        try:
            self._line.send(message)
        except PeerLost as lost:
            log.error("router is too far behind: %s", lost)
            self.abort(exchange)  # a body with a piece missing must not be used
            exchange.respond_error(INTERNAL)
            return
        if self._line.is_behind and not exchange.complete:
            self._paused.add(exchange)
            exchange.line.pause_upload(True)

    def _resume_uploads(self) -> None:
        paused, self._paused = self._paused, set()
        for exchange in paused:
            exchange.line.pause_upload(False)

    def _fail_all(self, error: RequestError) -> None:
        failed, self._open = self._open, {}
        for exchange in failed.values():
            if exchange.started:
                exchange.send(sse_error(error, exchange.route), last=True)
            else:
                exchange.respond_error(error)
        self._resume_uploads()

    def _on_message(self, message: Message) -> Iterator[None] | None:
        self.num_messages += 1
        return self._deliver(message) if isinstance(message, ReadyBytes) else None

    def _deliver(self, message: ReadyBytes) -> Iterator[None]:
        """Write a batch out. It has a row for each stream; a turn of the loop takes so many and no more."""
        data = memoryview(message.frames[0])
        start = 0
        columns = zip(message.request_ids, message.statuses, message.flags, message.num_bytes, strict=True)
        for request_id, status, flags, num_bytes in columns:
            end = start + num_bytes
            exchange = self._open.pop(request_id, None) if flags & LAST else self._open.get(request_id)
            if exchange is None:
                pass  # its client has gone
            elif status and not flags & STREAM:
                exchange.respond(status, JSON, bytes(data[start:end]))
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
