"""What time does to connections: timeouts, and comments in streams that are silent."""

from __future__ import annotations

import pytest

from api.http_head import KEEPALIVE
from tests.helpers.api_server import ApiServer
from tests.helpers.api_streams import start_stream
from tests.helpers.http_client import get, post, post_head
from tests.helpers.wait import wait_for
from tokservice.wire.errors import REQUEST_TIMEOUT

KIB = 1024


def test_header_timeout(server: ApiServer) -> None:
    """One byte at a time does not hold a connection: the clock starts with a request's first byte."""
    with server.connect() as client:
        for byte in get("/health")[:20]:
            client.send(bytes([byte]))
            server.sweep(1)
        server.sweep(35)
        response = client.read_response()
        assert (response.status, response.body) == (408, REQUEST_TIMEOUT.body())
        assert client.is_closed()


@pytest.mark.parametrize("size", [5000, 500_000])
def test_body_timeout(server: ApiServer, size: int) -> None:
    """A body of which too little arrives ends with 408; what the router has of it is aborted once."""
    with server.connect() as client:
        client.send(post_head(f"Content-Length: {size}") + b"x")
        if size > 64 * KIB:
            upload = server.router.wait(complete=False)
        server.sweep(50)
        client.send(b"y")  # a byte now and then is not enough
        assert client.send(b"") is client
        connection = server.connection_of(client)
        wait_for(lambda: server.call(lambda: connection._reader.arriving.received_bytes) == 2, what="received")  # type: ignore[union-attr]
        server.sweep(70)
        assert client.read_response().body == REQUEST_TIMEOUT.body()
        assert client.is_closed()
        if size > 64 * KIB:
            server.router.wait_for_abort(upload)


def test_body_timeout_of_a_request_that_is_refused(server: ApiServer) -> None:
    """An answer that waited for a body which never came was never given, and the connection stayed for ever."""
    with server.connect() as client:
        client.send(post_head("Content-Length: 100", path="/nowhere") + b"x")
        server.sweep(50)
        client.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.socket.recv(1)
        client.socket.settimeout(60)
        server.sweep(70)
        response = client.read_response()
        assert (response.status, response.keeps_alive) == (404, False)
        assert client.is_closed()


def test_broken_chunks_of_a_request_that_is_refused(server: ApiServer) -> None:
    """The same by malformed bytes."""
    with server.connect() as client:
        client.send(post_head("Transfer-Encoding: chunked", path="/nowhere"))
        assert client.read_response().status == 404
        client.send(b"zzz\r\n")
        assert client.is_closed()


def test_keep_alive_timeout(server: ApiServer) -> None:
    """Longer than common proxies' pools (75 s); then closed without a word."""
    with server.connect() as used, server.connect() as fresh:
        assert used.send(get("/health")).read_response().keeps_alive
        server.sweep(100)
        assert used.send(get("/health")).read_response().keeps_alive
        assert fresh.send(get("/health")).read_response().keeps_alive
        server.sweep(200)
        assert used.send(get("/health")).read_response().keeps_alive
        assert fresh.send(get("/health")).read_response().keeps_alive
        server.sweep(330)
        assert used.is_closed()
        assert fresh.is_closed()


def test_empty_lines_do_not_hold_a_connection(server: ApiServer) -> None:
    """They may come before a request, but do not begin one."""
    with server.connect() as client:
        client.send(b"\r\n" * 100)
        server.sweep(130)
        assert client.is_closed()


def test_nobody_waits_too_long_for_an_answer(server: ApiServer) -> None:
    """While the router works, the client's silence is right: no timeout of the connection applies."""
    with server.connect() as plain, server.connect() as stream:
        upload = start_stream(server, stream)
        plain.send(post(b"{}"))
        waiting = server.router.wait(2)
        server.sweep(3000)
        server.router.event(upload, b"data: 1\n\n", last=True)
        server.router.answer(waiting, 200, b"ok")
        assert stream.read_chunk() == KEEPALIVE
        assert stream.read_chunk() == b"data: 1\n\n"
        assert plain.read_response().body == b"ok"


def test_a_silent_stream_is_kept_alive(server: ApiServer) -> None:
    """A proxy cut the connection while a long prompt was computed: openai-python#2722. A comment, which is no event,
    follows once nothing was sent for a while; each event starts that time anew."""
    with server.connect() as client:
        server.sweep(0)
        client.send(post(b"{}"))
        upload = server.router.wait()
        server.sweep(100)  # no head yet: the status is still open
        server.router.open_stream(upload)
        assert client.read_head().status == 200
        server.sweep(110)
        server.sweep(116)
        assert client.read_chunk() == KEEPALIVE
        server.router.event(upload, b"data: 1\n\n")
        assert client.read_chunk() == b"data: 1\n\n"
        server.sweep(120)
        server.sweep(130)
        server.router.event(upload, b"data: 2\n\n")
        assert client.read_chunk() == b"data: 2\n\n", "it was not silent for long enough"
        server.sweep(145)
        assert client.read_chunk() == KEEPALIVE
        server.sweep(160)
        server.router.event(upload, b"data: 3\n\n", last=True)
        assert [client.read_chunk() for _ in range(3)] == [KEEPALIVE, b"data: 3\n\n", b""]
        server.sweep(200)  # the connection is idle: no comment between responses
        assert client.send(get("/health")).read_response().status == 200


def test_a_plain_response_is_not_kept_alive(server: ApiServer) -> None:
    """Its status is not known before it is here."""
    with server.connect() as client:
        server.sweep(0)
        client.send(post(b"{}"))
        upload = server.router.wait()
        server.sweep(50)
        server.sweep(100)
        server.router.answer(upload, 200, b"ok")
        assert client.read_response().body == b"ok"


def test_comments_can_be_switched_off() -> None:
    with ApiServer(sse_keepalive_s=0.0) as server, server.connect() as client:
        client.send(post(b"{}"))
        upload = server.router.wait()
        server.router.open_stream(upload)
        client.read_head()
        server.sweep(1000)
        server.router.event(upload, b"data: 1\n\n", last=True)
        assert client.read_chunk() == b"data: 1\n\n"
