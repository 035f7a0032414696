"""When an answer is written, and what is said about the connection."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from api.exchange import SMALL_BODY_BYTES, Exchange
from api.http_head import CONTINUE
from tokservice.wire.errors import NOT_FOUND, REQUEST_TIMEOUT


@dataclass
class FakeLine:
    """Keeps what is written."""

    is_surplus: bool = False
    origins: None = None
    date: bytes = b"now"
    written: bytes = b""
    statuses: list[int] = field(default_factory=list)
    finished: list[Exchange] = field(default_factory=list)

    def write(self, data: bytes) -> None:
        self.written += data

    def write_stream(self, data: bytes) -> None:
        self.written += data

    def response_started(self, status: int) -> None:
        self.statuses.append(status)

    def response_finished(self, exchange: Exchange) -> None:
        self.finished.append(exchange)


def exchange(*, content_length: int = 2, complete: bool = False, **headers: str) -> tuple[Exchange, FakeLine]:
    """A POST whose head is here."""
    line = FakeLine()
    it = Exchange(line)  # type: ignore[arg-type]
    it.method, it.keep_alive, it.content_length = b"POST", True, content_length
    it.headers = {name.encode(): value.encode() for name, value in headers.items()}
    if complete:
        it.request_arrived()
    return it, line


def test_an_answer_waits_for_a_small_body() -> None:
    """So that the connection can stay; what else would answer meanwhile comes too late."""
    it, line = exchange(content_length=SMALL_BODY_BYTES)
    it.respond_error(NOT_FOUND)
    it.respond(200, "text/plain", b"other")
    assert (line.written, it.is_answered, it.started) == (b"", True, False)
    it.request_arrived()
    assert line.statuses == [404]
    assert b"connection: keep-alive" in line.written
    assert line.finished == [it]


@pytest.mark.parametrize("content_length", [SMALL_BODY_BYTES + 1, -1])
def test_an_answer_does_not_wait_for_a_large_body(content_length: int) -> None:
    """Nor for one of unknown length: the connection closes instead."""
    it, line = exchange(content_length=content_length)
    it.respond_error(NOT_FOUND)
    assert b"connection: close" in line.written
    assert it.finished
    it.request_arrived()
    assert line.statuses == [404]


def test_close_does_not_wait() -> None:
    """Whatever the body."""
    it, line = exchange()
    it.respond_error(NOT_FOUND, close=True)
    assert b"connection: close" in line.written
    it, line = exchange(complete=True)
    it.respond_error(NOT_FOUND, close=True)
    assert b"connection: close" in line.written


@pytest.mark.parametrize("answered", [True, False])
def test_cut_short(answered: bool) -> None:
    """The answer that waited is given, or else the error; then the connection closes."""
    it, line = exchange()
    if answered:
        it.respond_error(NOT_FOUND)
    it.cut_short(REQUEST_TIMEOUT)
    assert line.statuses == [404 if answered else 408]
    assert b"connection: close" in line.written
    assert line.finished == [it]


def test_a_stream() -> None:
    """Chunks, nothing for no bytes, one end."""
    it, line = exchange(complete=True)
    it.open_stream(200)
    it.open_stream(500)
    head = line.written
    it.send(b"", last=False)
    assert line.written == head
    it.send(memoryview(b"abc"), last=False)
    it.send(b"d", last=True)
    it.send(b"late", last=True)
    it.respond_error(NOT_FOUND)
    assert line.written == head + b"3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n"
    assert (line.statuses, line.finished) == ([200], [it])


def test_the_body_is_invited_once_and_only_where_it_is_awaited() -> None:
    """Not where it is here already, nor for HTTP/1.0."""
    it, line = exchange(expect="100-continue")
    it.invite_body()
    assert line.written == CONTINUE
    changes: list[dict[str, object]] = [{"received_bytes": 1}, {"complete": True}, {"http_1_1": False}, {"headers": {}}]
    for change in changes:
        it, line = exchange(expect="100-continue")
        for name, value in change.items():
            setattr(it, name, value)
        it.invite_body()
        assert line.written == b""


def test_an_answer_drops_the_body() -> None:
    """It is not needed any more."""
    it, _ = exchange()
    it.kept.add(b"abc")
    it.respond_error(NOT_FOUND)
    assert not it.kept


def test_the_label() -> None:
    """The client's own id, else ours, else none."""
    headers: dict[str, Any] = {"x-request-id": "mine\t"}
    it, _ = exchange(**headers)
    assert it.label == b"mine_"
    it, _ = exchange()
    assert it.label == b""
    it.request_id = "api.0.1:7"
    assert it.label == b"api.0.1:7"
