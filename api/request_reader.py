"""Bytes of one connection to requests, within limits. Pure: no sockets, no clock. API process.

llhttp (httptools) parses and refuses malformed bytes: bare line ends, folded headers, both or several
framings. Checked here is what it leaves to its user: sizes, versions, Host (RFC 9112, sections 3.2 and 6.1).
"""

from __future__ import annotations

from typing import Protocol

import httptools

from api.exchange import Exchange, Line
from api.http_head import request_path
from tokservice.wire.errors import BAD_HTTP, HEADERS_TOO_LARGE, RequestError
from tokservice.wire.messages import Buffer

LONG_BODY_BYTES = 64 * 1024  # what comes of a longer one, in later reads, passes by the parser, which would copy it
MAX_HEADERS = 256
HEADER_OVERHEAD_BYTES = 4  # colon, blank and line end
ONCE = {b"host", b"transfer-encoding"}  # repeating these is how requests are smuggled


class Refused(Exception):
    """Nothing more can be read from this connection."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error)
        self.error = error


class Receiver(Line, Protocol):
    """Who takes the requests. What it raises passes through ``feed``."""

    def head_begins(self) -> None:
        """The first byte of a request is here."""

    def head_arrived(self, exchange: Exchange) -> None:
        """The request can be judged."""

    def body_arrived(self, exchange: Exchange, data: Buffer) -> None:
        """A piece of its body."""

    def request_arrived(self, exchange: Exchange) -> None:
        """The request is whole."""


class RequestReader:
    """Feeds one connection's bytes to the parser; ``arriving`` is the request that is not yet whole."""

    def __init__(self, receiver: Receiver, max_head_bytes: int) -> None:
        self.arriving: Exchange | None = None
        self.in_head = False
        self._receiver = receiver
        self._max_head_bytes = max_head_bytes
        self._parser = httptools.HttpRequestParser(self)
        self._passes_by = False  # a body, from the next ``feed`` on
        self._num_headers = 0
        self._head_bytes = 0  # target and headers (trailers too) of the arriving request
        self._noticed_bytes = 0  # that callbacks were given
        self._held_bytes = 0  # since then: an unfinished header in the parser's memory, or what frames chunks

    @property
    def body_left(self) -> int:
        """Bytes that the arriving request's stated length still promises."""
        exchange = self.arriving
        return 0 if exchange is None or self.in_head else max(0, exchange.content_length - exchange.received_bytes)

    def feed(self, data: bytes | memoryview) -> None:
        """Parse. Raises Refused; the reader is of no more use then."""
        if self._passes_by and data:
            data = self._pass_by(data)
            if not data:
                return
        noticed_bytes = self._noticed_bytes
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(bytes(data[upgrade.args[0] :]))
            return
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError:
            raise Refused(BAD_HTTP) from None
        if self.arriving is not None:
            self._held_bytes = 0 if self._noticed_bytes != noticed_bytes else self._held_bytes + len(data)
            self._check_head()

    def close(self) -> None:
        """Let go of the parser, and it of us: a cycle would wait for the garbage collector."""
        self.arriving = None
        del self._parser, self._receiver

    def _pass_by(self, data: bytes | memoryview) -> bytes | memoryview:
        """Hand on what of it is body, and have another parser take over after that; returns what follows."""
        size = min(len(data), self.body_left)
        self.on_body(data[:size])
        if not self.body_left:
            self._parser = httptools.HttpRequestParser(self)
            self.on_body_complete()
        return data[size:]

    def _check_head(self) -> None:
        if self._num_headers > MAX_HEADERS or self._head_bytes + self._held_bytes > self._max_head_bytes:
            raise Refused(HEADERS_TOO_LARGE)

    def _notice(self, num_bytes: int) -> None:
        """A callback was given what was held."""
        self._noticed_bytes += num_bytes
        self._held_bytes = 0

    def _decline_upgrade(self, rest: bytes) -> None:
        """Read on after the head of a request that asks for another protocol (h2c, websocket).

        The parser takes such a request for whole and hands the connection over. It is served in HTTP/1.1, as
        the specification allows; another parser, told of the framing alone, reads its body. Then the
        connection closes: what follows may already be in the other protocol.
        """
        exchange = self.arriving
        assert exchange is not None
        head = b"POST / HTTP/1.1\r\nConnection: close\r\n"
        for name in (b"content-length", b"transfer-encoding"):
            if name in exchange.headers:
                head += name + b": " + exchange.headers[name] + b"\r\n"
        self._parser = httptools.HttpRequestParser(_BodyOnly(self))
        self.feed(head + b"\r\n" + rest)

    # --- httptools callbacks

    def on_message_begin(self) -> None:
        """A request line begins."""
        self.arriving = Exchange(self._receiver)
        self.in_head = True
        self._num_headers = self._head_bytes = self._held_bytes = 0
        self._receiver.head_begins()

    def on_url(self, target: bytes) -> None:
        """A piece of the request target."""
        assert self.arriving is not None
        self.arriving.target += target
        self._head_bytes += len(target)
        self._notice(len(target))
        self._check_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or, after a chunked body, one trailer: those are dropped."""
        exchange = self.arriving
        assert exchange is not None
        size = len(name) + len(value) + HEADER_OVERHEAD_BYTES
        self._num_headers += 1
        self._head_bytes += size
        self._notice(size)
        self._check_head()
        if self.in_head:
            name = name.lower()
            if name in ONCE and name in exchange.headers:
                raise Refused(BAD_HTTP)
            exchange.headers[name] = value.rstrip(b" \t")  # those before it are gone already

    def on_headers_complete(self) -> None:
        """The head is whole."""
        exchange = self.arriving
        assert exchange is not None
        headers = exchange.headers
        version = self._parser.get_http_version()
        exchange.method = self._parser.get_method()
        exchange.path = request_path(exchange.target)
        exchange.http_1_1 = version == "1.1"
        exchange.keep_alive = self._parser.should_keep_alive() and not self._parser.should_upgrade()
        if version not in ("1.0", "1.1") or (exchange.http_1_1 and b"host" not in headers):
            raise Refused(BAD_HTTP)
        if b"transfer-encoding" not in headers:
            exchange.content_length = int(headers.get(b"content-length", b"0"))
        elif not exchange.http_1_1 or headers[b"transfer-encoding"].strip().lower() != b"chunked":
            raise Refused(BAD_HTTP)
        self.in_head = False
        # Not where the connection ends with this request: that parser takes nothing after it.
        self._passes_by = exchange.keep_alive and exchange.content_length > LONG_BODY_BYTES
        self._receiver.head_arrived(exchange)

    def on_body(self, data: Buffer) -> None:
        """A piece of the body."""
        exchange = self.arriving
        assert exchange is not None
        exchange.received_bytes += len(data)
        self._notice(len(data))
        self._receiver.body_arrived(exchange, data)

    def on_message_complete(self) -> None:
        """The request is whole, unless it asked for another protocol: then its body is still to come."""
        if not self._parser.should_upgrade():
            self.on_body_complete()

    def on_body_complete(self) -> None:
        """The request is whole."""
        exchange, self.arriving = self.arriving, None
        assert exchange is not None
        self._passes_by = False
        self._receiver.request_arrived(exchange)


class _BodyOnly:
    """The callbacks for a request whose head has been seen."""

    def __init__(self, reader: RequestReader) -> None:
        self.on_body = reader.on_body
        self.on_message_complete = reader.on_body_complete
