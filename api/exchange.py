"""One HTTP request and its response. API process."""

from __future__ import annotations

from typing import Protocol

from api.http_head import CONTINUE, EVENT_STREAM, JSON, LAST_CHUNK, chunk, response_head, safe_label
from tokservice.wire.errors import RequestError

SMALL_BODY_BYTES = 64 * 1024


class Line(Protocol):
    """What an exchange needs of its connection."""

    @property
    def date(self) -> bytes:
        """The current value of the Date header."""

    def write(self, data: bytes) -> None:
        """Bytes that are bounded by themselves."""

    def write_stream(self, data: bytes) -> None:
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
        self.method = b""
        self.url = b""
        self.headers: dict[bytes, bytes] = {}
        self.keep_alive = False
        self.http_1_1 = True
        self.content_length = -1  # -1: not stated (chunked)
        self.request_id = ""
        self.received_bytes = 0  # of the body
        self.begun = False  # it is this request's turn
        self.complete = False  # the whole request has arrived
        self.started = False  # the response's head is written
        self.finished = False
        self.kept = bytearray()  # body that has arrived, and is not yet passed on
        self._chunked = False
        self._waiting_answer: tuple[int, str, bytes] | None = None

    @property
    def path(self) -> str:
        """The path, without the query."""
        return self.url.partition(b"?")[0].decode("latin-1")

    @property
    def label(self) -> bytes:
        """The id that the response names: the client's own, or ours."""
        return safe_label(self.headers.get(b"x-request-id", b"")) or self.request_id.encode("ascii") or b"-"

    @property
    def expects_continue(self) -> bool:
        """The client sends its body only when it is told to."""
        return self.http_1_1 and self.headers.get(b"expect", b"").lower() == b"100-continue"

    def invite_body(self) -> None:
        """Tell a client that waits for it to send the body."""
        if self.expects_continue and not self.received_bytes:
            self.line.write(CONTINUE)

    def respond(self, status: int, content_type: str, body: bytes) -> None:
        """The whole response at once.

        Given before the request has arrived, it waits for the rest of a small body, which is dropped, so that
        the connection can stay; otherwise it goes out at once and the connection is closed.
        """
        if self.started or self._waiting_answer:
            return
        small = 0 <= self.content_length <= SMALL_BODY_BYTES and not self.expects_continue
        if not self.complete and small and self.keep_alive:
            self._waiting_answer = (status, content_type, body)
            return
        self.started = True
        self.keep_alive = self.keep_alive and self.complete
        head = self._head(status, content_type, len(body))
        self.line.write(head if self.method == b"HEAD" else head + body)
        self.line.response_started(status)
        self._finish()

    def respond_error(self, error: RequestError, *, close: bool = False) -> None:
        """The error's envelope."""
        self.keep_alive = self.keep_alive and not close
        self.respond(error.status, JSON, error.body())

    @property
    def is_answered(self) -> bool:
        """Whether the answer is known, so that further body is dropped."""
        return self.finished or self._waiting_answer is not None

    def request_complete(self) -> None:
        """The request has arrived: give the answer that waited for it."""
        self.complete = True
        if self._waiting_answer is not None:
            answer, self._waiting_answer = self._waiting_answer, None
            self.respond(*answer)

    def stream(self, status: int) -> None:
        """The head of a response whose bytes follow."""
        if self.started:
            return
        self.started = True
        self._chunked = self.http_1_1
        self.keep_alive = self.keep_alive and self.complete and self._chunked
        self.line.write(self._head(status, EVENT_STREAM, None))
        self.line.response_started(status)

    def send(self, data: bytes, *, last: bool) -> None:
        """More bytes of a streamed response."""
        if self.finished:
            return
        if self._chunked:
            data = (chunk(data) if data else b"") + (LAST_CHUNK if last else b"")
        if data:
            self.line.write_stream(data)
        if last:
            self._finish()

    def _head(self, status: int, content_type: str, content_length: int | None) -> bytes:
        return response_head(
            status,
            content_type,
            content_length=content_length,
            chunked=self._chunked,
            keep_alive=self.keep_alive,
            label=self.label,
            date=self.line.date,
        )

    def _finish(self) -> None:
        self.finished = True
        self.line.response_finished(self)
