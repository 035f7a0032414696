"""Bodies: whole in any framing, limited, and asked for where the client waits for that."""

from __future__ import annotations

import pytest

from tests.helpers.api_server import ApiServer
from tests.helpers.http_client import chunked, get, post, post_head
from tokservice.wire.errors import BODY_TOO_LARGE, OVERLOADED

MAX_BODY = 300_000


def body_of(size: int) -> bytes:
    """No two pieces alike."""
    return b"".join(b"%08x" % number for number in range(-(-size // 8)))[:size]


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 131_072, 2_000_000])
@pytest.mark.parametrize("form", ["length", "chunks", "trickle"])
def test_bodies_arrive_whole(server: ApiServer, size: int, form: str) -> None:
    """Whatever the framing, in order and in pieces of at most 64 KiB."""
    body = body_of(size)
    with server.connect() as client:
        if form == "length":
            client.send(post(body))
        elif form == "chunks":
            pieces = [body[start : start + 100_000] for start in range(0, size, 100_000)]
            client.send(post_head("Transfer-Encoding: chunked") + chunked(*pieces))
        else:
            head = post_head(f"Content-Length: {size}")
            client.send(head[:50]).send(head[50:])
            for start in range(0, size, 33_333):
                client.send(body[start : start + 33_333])
        upload = server.router.wait()
        assert upload.body == body
        assert upload.content_length == (-1 if form == "chunks" else size)
        assert server.router.largest_piece <= 65_536
        server.router.answer(upload, 200, b"ok")
        assert client.read_response().keeps_alive


def test_a_large_body_is_admitted_by_its_head(server: ApiServer) -> None:
    """The router hears of it before the body, and may refuse it meanwhile: the answer comes at once."""
    with server.connect() as client:
        client.send(post_head("Content-Length: 10000000"))
        upload = server.router.wait(complete=False)
        assert (upload.content_length, upload.body) == (10_000_000, b"")
        client.send(b"x" * 500_000)
        server.router.answer(upload, OVERLOADED.status, OVERLOADED.body())
        response = client.read_response()
        assert (response.status, response.headers["retry-after"]) == (429, "1")
        assert not response.keeps_alive
        client.send(b"x" * 500_000)  # does not matter any more, and does no harm
        assert client.is_closed()


@pytest.mark.parametrize("excess", [0, 1])
@pytest.mark.parametrize("form", ["length", "chunks"])
def test_the_limit_of_a_body(excess: int, form: str) -> None:
    """One byte over: 413, which can be read; the rest of the body is dropped, not kept."""
    body = body_of(MAX_BODY + excess)
    with ApiServer(max_body_bytes=MAX_BODY) as server, server.connect() as client:
        if form == "length":
            client.send(post(body))
        else:
            client.send(post_head("Transfer-Encoding: chunked") + chunked(body[:1000], body[1000:]))
        if not excess:
            assert server.router.wait().body == body
            return
        response = client.read_response()
        assert (response.status, response.body, response.keeps_alive) == (413, BODY_TOO_LARGE.body(), False)
        assert client.is_closed()
        if form == "chunks":
            upload = server.router.wait(complete=False)
            server.router.wait_for_abort(upload)
            assert len(upload.body) <= MAX_BODY
        else:
            server.router.pump()
            assert not server.router.uploads


def test_413_before_the_body_is_read() -> None:
    """By Content-Length alone; a client that goes on sending can still read the answer."""
    with ApiServer(max_body_bytes=MAX_BODY) as server, server.connect() as client:
        client.send(post_head("Content-Length: 99999999999"))
        response = client.read_response()
        assert response.status == 413
        for _ in range(20):
            client.send(b"x" * 100_000)
        assert client.is_closed()


def test_a_client_that_never_stops_sending() -> None:
    """What is refused is read on for a bounded time only."""
    with ApiServer(max_body_bytes=MAX_BODY) as server, server.connect() as client:
        client.send(post_head("Content-Length: 99999999999"))
        assert client.read_response().status == 413
        client.send(b"x" * 1000)
        server.sweep(10)
        server.wait_until_closed()


def test_expect_continue_accepted(server: ApiServer) -> None:
    """The body is asked for once, before it comes, whether small or large."""
    for size in (2, 100_000):
        with server.connect() as client:
            client.send(post_head("Expect: 100-Continue", f"Content-Length: {size}"))
            assert client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.send(b"x" * size)
            number = len(server.router.uploads) or 1
            upload = server.router.wait(number if size == 2 else 2)
            assert len(upload.body) == size
            server.router.answer(upload, 200, b"ok")
            assert client.read_response().body == b"ok"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (("Content-Length: 2", "Content-Encoding: gzip"), 415),
        (("Content-Length: 99999999999",), 413),
    ],
)
def test_expect_continue_refused(server: ApiServer, headers: tuple[str, ...], status: int) -> None:
    """The body is not asked for; since it may come all the same, the connection closes."""
    with server.connect() as client:
        client.send(post_head("Expect: 100-continue", *headers))
        response = client.read_response()
        assert (response.status, response.keeps_alive) == (status, False)
        assert client.is_closed()


def test_expect_continue_refused_by_the_router(server: ApiServer) -> None:
    """429 comes instead of the body's invitation, or after it; never is a response cut."""
    with server.connect() as client:
        client.send(post_head("Expect: 100-continue", "Content-Length: 100000"))
        upload = server.router.wait(complete=False)
        server.router.answer(upload, 429, OVERLOADED.body())
        assert client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert client.read_response().status == 429
        assert client.is_closed()


@pytest.mark.parametrize("request_bytes", [get("/health", "Expect: 100-continue"), post(b"{}", "Expect: nonsense")])
def test_expect_without_meaning(server: ApiServer, request_bytes: bytes) -> None:
    """Without a body, or other expectations: as if it were not there."""
    with server.connect() as client:
        client.send(request_bytes)
        if request_bytes.startswith(b"POST"):
            server.router.answer(server.router.wait(), 200, b"ok")
        assert client.read_response().status == 200
