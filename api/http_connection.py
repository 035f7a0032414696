"""One HTTP/1.1 connection: requests in, responses out, paced in both directions. API process.

Requests are answered in their order; what a client sends ahead waits, up to a limit beyond which the
connection is not read. So does everything while the client does not read its answers. However fast a client
sends, it gets a small share of each turn of the loop.

A client that closes its sending side counts as gone (as with most servers and proxies): HTTP has no other
sign by which work for a plain response could be stopped before it is written. A connection that is not read
is asked for it by ``sweep``.

Timeouts are kept by ``sweep``, which the process calls for all connections from a single timer; they are true
to a second or two.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import cast

from api.application import Application
from api.backlog import PIECE_BYTES, Backlog
from api.exchange import Exchange
from api.request_reader import Refused, RequestReader
from tokservice.wire.errors import DRAINING, REQUEST_TIMEOUT, RequestError
from tokservice.wire.messages import Buffer

MAX_SENT_AHEAD_BYTES = 64 * 1024  # of a client that does not wait for its answers
PARSE_BYTES = 4096  # in one turn of the loop, beside bodies of stated length
FULL_READ_BYTES = 64 * 1024  # a larger read is the last of its turn (libuv would make 32 of 256 KB each)
BODY_PIECE_BYTES = 64 * 1024  # of which one has to arrive in each ``body_timeout_s``
PIECES_PER_TURN = 4  # of what waits for its client
DRAIN_PIECE_S = 5.0  # instead of ``body_timeout_s`` while the server drains: an idle upload must not hold its end up
DISCARD_S = 5.0  # how long the rest of a refused body is read, so that the client can read its answer
WRITE_HIGH_WATER_BYTES = 64 * 1024
TCP_CLOSE, TCP_CLOSE_WAIT = 7, 8  # tcpi_state, linux/tcp_states.h


class HttpConnection(asyncio.Protocol):
    """See the module's docstring."""

    def __init__(self, application: Application, loop: asyncio.AbstractEventLoop) -> None:
        self.is_surplus = False
        self.origins = application.origins
        self._application = application
        self._settings = application.settings
        self._loop = loop
        self._transport: asyncio.Transport
        self._gone = False
        self._now_s = self._since_s = (
            loop.time()
        )  # the last sweep; when the connection began to wait for what it now waits for
        # reading
        self._reader = RequestReader(self, application.settings.max_header_bytes)
        self._exchanges: deque[Exchange] = deque()  # unfinished; the first is being served
        self._sent_ahead = bytearray()  # not yet parsed
        self._num_unparsed = 0  # of the read that is being parsed
        self._turn: asyncio.Handle | None = None  # of the loop, in which reading goes on
        self._advancing = False
        self._upload_paused = False
        self._reading = True
        self._discarding = False  # whatever else arrives
        # writing
        self._writing = True
        self._unsent = Backlog(application.held)
        self._sending: asyncio.Handle | None = None  # the turn of the loop in which writing goes on
        self._leaving = False  # once everything is written
        self._client_ended = False  # its sending side
        self._unsent_bytes_seen = 0
        self._silent_since_s = 0.0  # the sweep before the last piece of a response

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        self._application.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone, or we closed."""
        self._gone = True
        for handle in (self._turn, self._sending):
            if handle is not None:
                handle.cancel()
        self._unsent.clear()
        self._application.closed(self)
        unfinished = [exchange for exchange in self._exchanges if not exchange.finished]
        self._exchanges.clear()
        for exchange in unfinished:
            exchange.finished = True
            if exchange.begun:
                self._application.abandoned(exchange)
        self._reader.close()

    def eof_received(self) -> bool:
        """The client has closed its sending side: work for it stops, what is finished is still sent.

        True keeps the transport open for that.
        """
        self._client_ended = True
        if self._is_serving:
            self.drop()
        self._leaving = bool(self._unsent)
        return self._leaving

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self._discarding:
            return
        if self._sent_ahead or self._is_answer_due:
            self._sent_ahead += data
        else:
            size = self._share_bytes
            self._num_unparsed = max(0, len(data) - size)
            self._parse(data[:size])
            if self._num_unparsed:
                self._read_on(memoryview(data)[size:])
        self._pace_reading(yielding=len(data) >= FULL_READ_BYTES)

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        self._writing = False

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._writing = True
        self._send_on()

    # --- for requests (``request_reader.Receiver``)

    def head_begins(self) -> None:
        """The clock of ``header_timeout_s`` starts."""
        self._since_s = self._now_s

    def head_arrived(self, exchange: Exchange) -> None:
        """Line a request up."""
        self._since_s = self._now_s
        self._exchanges.append(exchange)
        self._advance()

    def body_arrived(self, exchange: Exchange, data: Buffer) -> None:
        """Keep a piece of a body, and hand it on if it is the request's turn."""
        received_bytes = exchange.received_bytes
        if received_bytes // BODY_PIECE_BYTES != (received_bytes - len(data)) // BODY_PIECE_BYTES:
            self._since_s = self._now_s
        if not exchange.is_answered:
            exchange.kept.add(data)
            if exchange.begun:
                self._application.body(exchange)

    def request_arrived(self, exchange: Exchange) -> None:
        """A request is whole."""
        exchange.request_arrived()
        if exchange.begun and not exchange.is_answered:
            self._application.body(exchange)

    # --- for responses (``exchange.Line``)

    @property
    def date(self) -> bytes:
        """The current value of the Date header."""
        return self._application.date

    def write(self, data: Buffer) -> None:
        """Write bytes that are bounded by themselves; large ones must stay as they are."""
        if not self._unsent and len(data) <= PIECE_BYTES:
            self._transport.write(data)
        elif not self._gone:
            self._keep(data)
            if self._sending is None:
                self._send_on()

    def write_stream(self, data: Buffer) -> None:
        """Write, or join to what waits for a slow reader; too much of it ends the connection."""
        if self._gone:
            return
        self._silent_since_s = self._now_s
        if self._writing:
            self.write(data)
        else:
            self._keep(data)
            if self._unsent.num_joined > self._settings.max_unsent_bytes:
                self.cut_off()

    def pause_upload(self, paused: bool) -> None:
        """Stop reading a body while the router is behind."""
        self._upload_paused = paused
        self._since_s = self._now_s
        self._pace_reading()

    def response_started(self, status: int) -> None:
        """A response began."""
        self._silent_since_s = self._now_s
        self._application.response_started(status)

    def response_finished(self, exchange: Exchange) -> None:
        """Serve the next request, or close."""
        self._since_s = self._now_s
        if exchange.keep_alive:
            self._exchanges.popleft()
            self._advance()
        else:
            self._leave()

    # --- for the process

    def refuse(self, error: RequestError) -> None:
        """Read no more: answer the arriving request with an error, after those before it, and close."""
        if not self._exchanges:
            self._exchanges.append(self._reader.arriving or Exchange(self))
        current = self._exchanges[0]
        self._discard_input()
        current.keep_alive = False
        if not current.started and not current.complete:
            current.begun = True
            self._application.abandoned(current)
            current.cut_short(error)

    def refuse_arriving(self, error: RequestError) -> None:
        """Answer a request that has not arrived with an error; others go on."""
        if self._reader.arriving is not None and not self._gone:
            self.refuse(error)

    def hurry(self) -> None:
        """The server drains: the clock of what is arriving starts anew, and runs faster."""
        self._since_s = self._now_s

    def drop(self) -> None:
        """End the connection at once."""
        self._gone = True
        self._unsent.clear()
        self._transport.abort()

    def cut_off(self) -> None:
        """End the connection since its client does not read."""
        self._application.slow_reader()
        self.drop()

    def close_if_idle(self) -> None:
        """Close unless a request is being served."""
        if not self._exchanges and not self._gone:
            self._leaving = bool(self._unsent)
            if not self._leaving:
                self._transport.close()

    @property
    def held_bytes(self) -> int:
        """What waits here until the client reads."""
        return self._unsent.held_bytes

    @property
    def is_flushed(self) -> bool:
        """Whether everything written has left this process."""
        return self._gone or (not self._unsent and self._transport.get_write_buffer_size() == 0)

    def sweep(self, now_s: float) -> None:
        """Close the connection if it has waited too long for whatever it waits for; keep a silent stream alive."""
        self._now_s = now_s
        if not self._reading and self._is_serving and _has_hung_up(self._transport):
            self.drop()
        if self._gone or self._is_writing(now_s):
            return
        settings = self._settings
        if self._is_serving and 0 < settings.sse_keepalive_s <= now_s - self._silent_since_s:
            self._exchanges[0].send_keepalive()
        waited_s = now_s - self._since_s
        if self._discarding:
            if waited_s > DISCARD_S and not self._is_serving:
                self.drop()
        elif self._reader.arriving is not None:
            limit_s = settings.header_timeout_s if self._reader.in_head else settings.body_timeout_s
            draining = self._application.draining
            if self._reading and waited_s > (min(limit_s, DRAIN_PIECE_S) if draining else limit_s):
                self.refuse(DRAINING if draining else REQUEST_TIMEOUT)
        elif not self._exchanges and waited_s > (DISCARD_S if self.is_surplus else settings.keep_alive_s):
            self._transport.close()

    # --- private

    @property
    def _is_serving(self) -> bool:
        return bool(self._exchanges) and not self._exchanges[0].finished

    @property
    def _is_answer_due(self) -> bool:
        return bool(self._exchanges) and self._exchanges[-1].complete

    @property
    def _share_bytes(self) -> int:
        """What one turn of the loop may parse: requests and chunks cost time, a body of stated length does not."""
        return max(PARSE_BYTES, self._reader.body_left)

    def _take_turn(self) -> None:
        """Go on with what was sent ahead, after the loop has looked at others."""
        self._turn = None
        if self._has_work:
            size = self._share_bytes
            data = bytes(memoryview(self._sent_ahead)[:size])
            del self._sent_ahead[:size]
            self._parse(data)
        self._pace_reading()

    def _read_on(self, rest: memoryview) -> None:
        """The rest of a read whose share was parsed: what of it is body of stated length too, without a copy."""
        size = 0 if self._upload_paused else min(len(rest), self._reader.body_left)
        self._num_unparsed = len(rest) - size
        if size and not self._discarding:
            self._parse(rest[:size])
        if not self._discarding:
            self._sent_ahead += rest[size:]
        self._num_unparsed = 0

    @property
    def _has_work(self) -> bool:
        return bool(self._sent_ahead) and not (self._is_answer_due or self._upload_paused)

    def _parse(self, data: bytes | memoryview) -> None:
        try:
            self._reader.feed(data)
        except Refused as refused:
            self.refuse(refused.error)

    def _advance(self) -> None:
        """Begin the request whose turn it is, once the client has read what came before."""
        if self._advancing:
            return
        self._advancing = True
        while self._exchanges and not self._exchanges[0].begun and self._may_begin:
            exchange = self._exchanges[0]
            exchange.begun = True
            self._application.begin(exchange)
            if not exchange.is_answered and (exchange.kept or exchange.complete):
                self._application.body(exchange)
        self._advancing = False
        self._pace_reading()

    @property
    def _may_begin(self) -> bool:
        return self._writing and not self._unsent and not self._gone

    def _leave(self) -> None:
        """Close, once everything is written; but read on where the client may still send."""
        self._leaving = bool(self._unsent)
        if self._leaving or self._gone:
            return
        sent_more = self._discarding or self._sent_ahead or self._num_unparsed or len(self._exchanges) > 1
        is_whole = not self._exchanges or self._exchanges[0].complete
        if self._client_ended or (is_whole and not sent_more):
            self._transport.close()
        else:
            # Closing now would reset the connection under the answer: read on a while, then close.
            self._discard_input()
            self._transport.write_eof()

    def _discard_input(self) -> None:
        self._discarding = True
        self._sent_ahead.clear()
        self._pace_reading()

    def _pace_reading(self, *, yielding: bool = False) -> None:
        """Read only while what has been read is dealt with; ``yielding``: others come first."""
        if self._turn is None and (yielding or self._has_work):
            self._turn = self._loop.call_soon(self._take_turn)
        num_ahead = len(self._sent_ahead) + sum(len(item.kept) for item in self._exchanges if not item.begun)
        waits = self._turn is not None or self._upload_paused or num_ahead > MAX_SENT_AHEAD_BYTES
        reading = self._discarding or not waits
        if reading != self._reading and not self._gone:
            self._reading = reading
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _keep(self, data: Buffer) -> None:
        self._unsent.add(data)
        self._application.make_room()

    def _send_on(self) -> None:
        """Write what waits, a share in each turn of the loop; then go on with what waited for that."""
        for _ in range(PIECES_PER_TURN):
            if not (self._writing and self._unsent) or self._gone:
                break
            self._transport.write(self._unsent.take())
        if self._unsent:
            if self._writing and self._sending is None:
                self._sending = self._loop.call_soon(self._take_sending_turn)
        elif self._leaving:
            self._leave()
        else:
            self._advance()

    def _take_sending_turn(self) -> None:
        self._sending = None
        self._send_on()

    def _is_writing(self, now_s: float) -> bool:
        """Whether the connection waits for its client to read; if for too long, it is cut off."""
        unsent_bytes = len(self._unsent) + self._transport.get_write_buffer_size()
        if unsent_bytes != self._unsent_bytes_seen:
            self._unsent_bytes_seen = unsent_bytes
            self._since_s = now_s
        elif unsent_bytes and now_s - self._since_s > self._settings.write_stall_s:
            self.cut_off()
        return unsent_bytes > 0


def _has_hung_up(transport: asyncio.Transport) -> bool:
    """Whether the client has closed its side, without reading what came before that (Linux; elsewhere False)."""
    if not hasattr(socket, "TCP_INFO"):
        return False
    state = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state in (TCP_CLOSE, TCP_CLOSE_WAIT)
