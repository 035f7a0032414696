"""One HTTP request and its response. API process."""

from __future__ import annotations

from typing import Protocol

from api.backlog import PIECE_BYTES
from api.cors import Origins
from api.http_head import CONTINUE, EVENT_STREAM, JSON, KEEPALIVE, LAST_CHUNK, chunk, response_head, safe_label
from api.kept_body import KeptBody
from tokservice.wire.errors import ANTHROPIC_ROUTES, RequestError
from tokservice.wire.messages import Buffer

SMALL_BODY_BYTES = 64 * 1024


class Line(Protocol):
    """What an exchange needs of its connection."""

    is_surplus: bool  # more connections are open than are served
    origins: Origins | None  # whose pages may read the answers

    @property
    def date(self) -> bytes:
        """The current value of the Date header."""

    def write(self, data: Buffer) -> None:
        """Bytes that are bounded by themselves; large ones must stay as they are."""

    def write_stream(self, data: Buffer) -> None:
        """Bytes of a stream, for which a slow reader has a limit."""

    def pause_upload(self, paused: bool) -> None:
        """Stop or go on reading the body."""

    def response_started(self, status: int) -> None:
        """The head was written."""

    def response_finished(self, exchange: Exchange) -> None:
        """All was written."""


class Exchange:
    """A request as far as it has arrived, and the ways to answer it."""

    def __init__(self, line: Line) -> None:
        self.line = line
        # the request, filled in by ``RequestReader``
        self.method = b""
        self.target = b""
        self.path = ""
        self.route = 0  # once it is this request's turn: wire.messages.Route, or 0 for pages
        self.headers: dict[bytes, bytes] = {}  # names in lower case; of a repeated one the last
        self.http_1_1 = True
        self.keep_alive = False  # the connection stays open after the response
        self.content_length = -1  # -1: not stated (chunked)
        self.received_bytes = 0  # of the body
        self.kept = KeptBody()
        self.complete = False  # the whole request has arrived
        # its way
        self.begun = False  # it is this request's turn
        self.request_id = ""  # once the router knows of it
        # the response
        self.started = False  # its head is written
        self.finished = False
        self._chunked = False
        self._answer: tuple[int, str, Buffer, bytes] | None = None  # status, content type, body, Allow

    @property
    def label(self) -> bytes:
        """The id that the response names: the client's own, or ours."""
        return safe_label(self.headers.get(b"x-request-id", b"")) or self.request_id.encode("ascii")

    @property
    def session(self) -> str:
        """The client's name for the conversation that the request belongs to."""
        return safe_label(self.headers.get(b"x-session-id", b"")).decode("ascii")

    @property
    def expects_continue(self) -> bool:
        """The client sends its body only when it is told to."""
        return self.http_1_1 and self.headers.get(b"expect", b"").lower() == b"100-continue"

    @property
    def is_answered(self) -> bool:
        """Whether the answer is known, so that further body is dropped."""
        return self.finished or self._answer is not None

    @property
    def has_whole_body(self) -> bool:
        """Whether all of a body of stated length is here; ``complete`` follows at once."""
        return self.received_bytes == self.content_length

    def invite_body(self) -> None:
        """Tell a client that waits for it to send the body."""
        if self.expects_continue and not self.complete and not self.received_bytes:
            self.line.write(CONTINUE)

    def respond(self, status: int, content_type: str, body: Buffer, *, close: bool = False, allow: bytes = b"") -> None:
        """The whole response at once.

        Given before the request has arrived, it waits for the rest of a small body, which is dropped, so that
        the connection can stay. With ``close``, or where much is to come, it goes out at once and the
        connection is closed.
        """
        if self.started or self.is_answered:
            return
        self.kept.clear()
        self.keep_alive = self.keep_alive and not close
        self._answer = (status, content_type, body, allow)
        rest_is_small = 0 <= self.content_length <= SMALL_BODY_BYTES and not self.expects_continue
        if self.complete or close or not rest_is_small:
            self._write_answer()

    def respond_error(self, error: RequestError, *, close: bool = False, allow: bytes = b"") -> None:
        """The error in the envelope that the route's clients read."""
        self.respond(error.status, JSON, error.body(self.route), close=close, allow=allow)

    def request_arrived(self) -> None:
        """The request is whole: give the answer that waited for it."""
        self.complete = True
        if self._answer is not None and not self.started:
            self._write_answer()

    def cut_short(self, error: RequestError) -> None:
        """The rest of the request will not be read: give the answer that waits for it, or this error."""
        self.respond_error(error, close=True)
        if not self.started:
            self.keep_alive = False
            self._write_answer()

    def open_stream(self, status: int) -> None:
        """The head of a response whose bytes follow."""
        if self.started:
            return
        self.started = True
        self._chunked = self.http_1_1
        self.keep_alive = self.keep_alive and self.complete and self._chunked
        self.line.write(self._head(status, EVENT_STREAM, None))
        self.line.response_started(status)

    def send_keepalive(self) -> None:
        """Say on an open stream that the connection lives; between events, as every piece of a stream ends one."""
        if self.started and self._answer is None:
            self.send(KEEPALIVE, last=False)

    def send(self, data: Buffer, *, last: bool) -> None:
        """More bytes of a streamed response."""
        if self.finished:
            return
        if data:
            self._write_piece(data)
        if last:
            if self._chunked:
                self.line.write_stream(LAST_CHUNK)
            self._finish()

    def _write_piece(self, data: Buffer) -> None:
        if not self._chunked or len(data) <= PIECE_BYTES:
            self.line.write_stream(chunk(data) if self._chunked else bytes(data))  # not the whole message waits with it
            return
        self.line.write_stream(b"%x\r\n" % len(data))
        self.line.write_stream(data)
        self.line.write_stream(b"\r\n")

    def _write_answer(self) -> None:
        assert self._answer is not None
        status, content_type, body, allow = self._answer
        self.started = True
        self.keep_alive = self.keep_alive and self.complete
        head = self._head(status, content_type, len(body), allow)
        if self.method == b"HEAD":
            body = b""
        if len(body) <= PIECE_BYTES:
            self.line.write(head + body)
        else:
            self.line.write(head)
            self.line.write(body)
        self.line.response_started(status)
        self._finish()

    def _head(self, status: int, content_type: str, content_length: int | None, allow: bytes = b"") -> bytes:
        extra = self.line.origins.headers(self.method, self.headers) if self.line.origins is not None else b""
        label = self.label
        if label and self.route in ANTHROPIC_ROUTES:
            extra += b"\r\nrequest-id: " + label  # the name that clients of that API read
        return response_head(
            status,
            content_type,
            content_length=content_length,
            chunked=self._chunked,
            keep_alive=self.keep_alive,
            label=label,
            date=self.line.date,
            allow=allow,
            extra=extra,
        )

    def _finish(self) -> None:
        self.finished = True
        self.line.response_finished(self)
