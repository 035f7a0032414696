"""One HTTP/1.1 connection: bytes in, exchanges out, paced in both directions. API process.

httptools (llhttp) parses; this file decides when to read, when to write and when to give up. Requests on a
connection are answered in their order; what a client sends ahead waits, up to a limit. A client that closes
its sending side counts as gone: only so can a plain response be aborted before it is written.

Timeouts are kept by ``sweep``, which the process calls for all connections from a single timer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol, cast

import httptools

from api.exchange import Exchange
from tokservice.runtime.config import ApiConfig
from tokservice.wire.errors import BAD_HTTP, HEADERS_TOO_LARGE, REQUEST_TIMEOUT, RequestError

MAX_HEADERS = 256
MAX_SENT_AHEAD = 128  # requests of a client that does not wait for its answers
MAX_SENT_AHEAD_BYTES = 64 * 1024
DISCARD_S = 5.0  # how long the rest of a refused body is read, so that the client can read its answer
WRITE_HIGH_WATER_BYTES = 64 * 1024


class Application(Protocol):
    """What is done with exchanges; see ``app.py``."""

    settings: ApiConfig
    date: bytes

    def opened(self, connection: HttpConnection) -> None:
        """A client connected."""

    def closed(self, connection: HttpConnection) -> None:
        """Its connection is gone."""

    def begin(self, exchange: Exchange) -> None:
        """A request's headers are here."""

    def body(self, exchange: Exchange, data: bytes) -> None:
        """A piece of its body is here, perhaps an empty one; ``exchange.complete`` says whether it is the last."""

    def abandoned(self, exchange: Exchange) -> None:
        """Nobody waits for the answer any more."""

    def response_started(self, status: int) -> None:
        """A response began."""

    def slow_reader(self) -> None:
        """A client was cut off since it did not read."""


class _HeadTooLarge(Exception):
    pass


class HttpConnection(asyncio.Protocol):
    """See the module's docstring."""

    def __init__(self, application: Application, now_s: float) -> None:
        self._application = application
        self._settings = application.settings
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._closed = False
        self._now_s = now_s  # as of the last sweep
        self._since_s = now_s  # when the connection began to wait for what it now waits for
        # reading
        self._exchanges: deque[Exchange] = deque()  # unfinished; the first is being served
        self._arriving: Exchange | None = None  # the one whose request is being parsed
        self._in_head = False
        self._head_bytes = 0
        self._parsing = False
        self._advancing = False
        self._sent_ahead = bytearray()
        self._discarding = False
        self._upload_paused = False
        self._reading = True
        # writing
        self._writing = True
        self._unsent = bytearray()
        self._unsent_bytes_seen = 0

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        self._application.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone, or we closed."""
        self._closed = True
        self._application.closed(self)
        unfinished, self._exchanges = self._exchanges, deque()
        for exchange in unfinished:
            if not exchange.finished:
                exchange.finished = True
                self._application.abandoned(exchange)

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self._discarding:
            return
        if self._exchanges and self._exchanges[-1].complete:
            self._sent_ahead += data
            self._pace_reading()
        else:
            self._parse(data)

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        self._writing = False

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._writing = True
        self._flush()

    # --- for exchanges (``exchange.Line``)

    @property
    def date(self) -> bytes:
        """The current value of the Date header."""
        return self._application.date

    def write(self, data: bytes) -> None:
        """Write bytes that are bounded by themselves."""
        if self._unsent:
            self._unsent += data
        elif not self._closed:
            self._transport.write(data)

    def write_stream(self, data: bytes) -> None:
        """Write, or join to what waits for a slow reader; too much of it ends the connection."""
        if self._writing:
            self.write(data)
            return
        self._unsent += data
        if len(self._unsent) > self._settings.max_unsent_bytes:
            self._cut_off()

    def pause_upload(self, paused: bool) -> None:
        """Stop reading a body while the router is behind."""
        self._upload_paused = paused
        self._since_s = self._now_s
        self._pace_reading()

    def response_started(self, status: int) -> None:
        """A response began."""
        self._application.response_started(status)

    def response_finished(self, exchange: Exchange) -> None:
        """Serve the next request, or close."""
        self._since_s = self._now_s
        if exchange.keep_alive:
            self._exchanges.popleft()
            self._advance()
        elif exchange.complete:
            self._flush()
            self._transport.close()  # once everything written has left
        else:
            # Closing now would reset the connection under the answer: read on a while, then close.
            self._discarding = True
            self.pause_upload(False)
            self._flush()
            if self._transport.can_write_eof():
                self._transport.write_eof()

    # --- for the process

    def close_if_idle(self) -> None:
        """Close unless a request is being served."""
        if not self._exchanges and not self._closed:
            self._transport.close()

    def refuse(self, error: RequestError) -> None:
        """Answer the request that is arriving with an error, if nothing else is being said, and close."""
        if not self._exchanges:
            self._exchanges.append(self._arriving or Exchange(self))
        current = self._exchanges[0]
        if current.started or current.complete:
            self._discarding = True
            current.keep_alive = False
            return
        self._application.abandoned(current)
        current.respond_error(error, close=True)

    @property
    def is_flushed(self) -> bool:
        """Whether everything written has left this process."""
        return self._closed or (not self._unsent and self._transport.get_write_buffer_size() == 0)

    def sweep(self, now_s: float) -> None:
        """Close the connection if it has waited too long for whatever it waits for."""
        self._now_s = now_s
        if self._sweep_writing(now_s):
            return
        settings = self._settings
        waited_s = now_s - self._since_s
        if self._discarding:
            if waited_s > DISCARD_S:
                self._transport.abort()
        elif self._arriving is not None and not self._upload_paused:
            if waited_s > (settings.header_timeout_s if self._in_head else settings.body_timeout_s):
                self.refuse(REQUEST_TIMEOUT)
        elif not self._exchanges and waited_s > settings.keep_alive_s:
            self._transport.close()

    # --- httptools callbacks

    def on_message_begin(self) -> None:
        """A request line begins."""
        self._arriving = Exchange(self)
        self._in_head = True
        self._head_bytes = 0
        self._since_s = self._now_s

    def on_url(self, url: bytes) -> None:
        """A piece of the request target."""
        assert self._arriving is not None
        self._arriving.url += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, whole."""
        assert self._arriving is not None
        self._arriving.headers[name.lower()] = value
        self._count_head(len(name) + len(value) + 4)
        if len(self._arriving.headers) > MAX_HEADERS:
            raise _HeadTooLarge

    def on_headers_complete(self) -> None:
        """The request can be judged."""
        exchange = self._arriving
        assert exchange is not None
        self._in_head = False
        exchange.method = self._parser.get_method()
        exchange.keep_alive = self._parser.should_keep_alive() and not self._parser.should_upgrade()
        exchange.http_1_1 = self._parser.get_http_version() == "1.1"
        if b"transfer-encoding" not in exchange.headers:
            exchange.content_length = int(exchange.headers.get(b"content-length", b"0"))
        if len(self._exchanges) >= MAX_SENT_AHEAD:
            raise httptools.HttpParserError("too many requests sent ahead")
        self._exchanges.append(exchange)
        self._advance()

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        exchange = self._arriving
        assert exchange is not None
        self._since_s = self._now_s
        exchange.received_bytes += len(data)
        if exchange.is_answered:
            return
        if exchange.begun:
            self._application.body(exchange, data)
        else:
            exchange.kept += data

    def on_message_complete(self) -> None:
        """The request is whole."""
        exchange, self._arriving = self._arriving, None
        assert exchange is not None
        exchange.request_complete()
        if exchange.begun and not exchange.is_answered:
            self._application.body(exchange, b"")

    # --- private

    def _parse(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)  # a header that is not yet whole has not been counted
        self._parsing = True
        try:
            self._parser.feed_data(data)
            if self._in_head and self._head_bytes > self._settings.max_header_bytes:
                self.refuse(HEADERS_TOO_LARGE)
        except httptools.HttpParserUpgrade:
            self._discarding = True  # the request is answered in HTTP/1.1; what follows it is something else
        except httptools.HttpParserError as error:
            if not self._discarding:
                self.refuse(HEADERS_TOO_LARGE if isinstance(error.__context__, _HeadTooLarge) else BAD_HTTP)
        finally:
            self._parsing = False

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > 2 * self._settings.max_header_bytes:  # whole headers may be counted twice
            raise _HeadTooLarge

    def _advance(self) -> None:
        """Begin the request whose turn it is."""
        if self._advancing:
            return
        self._advancing = True
        while self._exchanges and not self._exchanges[0].begun:
            exchange = self._exchanges[0]
            exchange.begun = True
            self._application.begin(exchange)
            kept, exchange.kept = bytes(exchange.kept), bytearray()
            if (kept or exchange.complete) and not exchange.is_answered:
                self._application.body(exchange, kept)
        self._advancing = False
        if not self._exchanges and self._sent_ahead and not self._parsing:
            data, self._sent_ahead = bytes(self._sent_ahead), bytearray()
            self._pace_reading()
            self._parse(data)

    def _pace_reading(self) -> None:
        reading = not self._upload_paused and len(self._sent_ahead) <= MAX_SENT_AHEAD_BYTES
        if reading != self._reading and not self._closed:
            self._reading = reading
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _flush(self) -> None:
        if self._unsent and not self._closed:
            unsent, self._unsent = bytes(self._unsent), bytearray()
            self._transport.write(unsent)

    def _cut_off(self) -> None:
        self._application.slow_reader()
        self._transport.abort()

    def _sweep_writing(self, now_s: float) -> bool:
        """Whether the connection waits for its client to read."""
        unsent_bytes = len(self._unsent) + self._transport.get_write_buffer_size()
        if unsent_bytes != self._unsent_bytes_seen:
            self._unsent_bytes_seen = unsent_bytes
            self._since_s = now_s
        elif unsent_bytes and now_s - self._since_s > self._settings.write_stall_s:
            self._cut_off()
        return unsent_bytes > 0
