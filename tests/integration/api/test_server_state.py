"""What the whole server's state means for a request: draining, full, idle, another family of addresses."""

from __future__ import annotations

import pytest

from tests.helpers.api_server import ApiServer
from tests.helpers.http_client import RawClient, get, post, post_head
from tests.helpers.ipv6 import NEEDS_IPV6
from tests.helpers.wait import wait_for
from tokservice.wire.errors import DRAINING, TOO_MANY_CONNECTIONS


def test_draining(server: ApiServer) -> None:
    """New requests get 503 and close; running streams go on; probes are answered."""
    with server.connect() as running, server.connect() as waiting, server.connect() as late:
        upload = server.router.wait() if running.send(post(b"{}")) else None
        assert upload is not None
        server.router.open_stream(upload)
        running.read_head()
        waiting.send(post_head("Content-Length: 5") + b"12")
        server.call(server.app.drain)
        for data in (post(b"{}"), post_head("Transfer-Encoding: chunked"), post_head("Content-Length: 4000000")):
            with server.connect() as client:
                response = client.send(data).read_response()
                assert (response.status, response.body) == (503, DRAINING.body())
                assert response.headers["connection"] == "close"
                assert client.is_closed()
        assert late.send(get("/health")).read_response().status == 200
        server.router.event(upload, b"data: 1\n\n")
        assert running.read_chunk() == b"data: 1\n\n"
        server.router.event(upload, b"", last=True)
        assert running.read_chunk() == b""
        waiting.send(b"345")  # was let in before
        assert server.router.wait(2).body == b"12345"


def test_an_idle_upload_does_not_hold_a_drain(server: ApiServer) -> None:
    """A body of which half was sent held the end of the server up for thirty seconds; one that arrives is served."""
    with server.connect() as idle, server.connect() as arriving:
        idle.send(post_head("Content-Length: 400000") + b"x")
        upload = server.router.wait(1, complete=False)
        arriving.send(post_head("Content-Length: 150000") + b"x" * 1000)
        server.router.wait(2, complete=False)
        server.sweep(20)
        server.call(server.app.drain)
        server.sweep(24)
        arriving.send(b"x" * 99_000)
        connection = server.connection_of(arriving)
        wait_for(lambda: server.call(lambda: connection._reader.arriving.received_bytes) == 100_000, what="received")  # type: ignore[union-attr]
        server.sweep(26)
        response = idle.read_response()
        assert (response.status, response.body) == (503, DRAINING.body())
        server.router.wait_for_abort(upload)
        arriving.send(b"x" * 50_000)
        assert len(server.router.wait(2).body) == 150_000


def test_too_many_connections() -> None:
    """Those above the limit get an answer and close; probes still succeed, or a full server would be restarted."""
    with ApiServer(max_connections=2) as server, server.connect() as first, server.connect() as second:
        assert first.send(get("/health")).read_response().keeps_alive
        assert second.send(get("/health")).read_response().keeps_alive
        with server.connect() as third:
            response = third.send(post(b"{}")).read_response()
            assert (response.status, response.body) == (503, TOO_MANY_CONNECTIONS.body())
            assert response.headers["retry-after"] == "1"
            assert third.is_closed()
        with server.connect() as third:
            response = third.send(get("/health")).read_response()
            assert (response.status, response.keeps_alive) == (200, False)
            assert third.is_closed()
        with server.connect() as idle:
            server.sweep(10)
            assert idle.is_closed()
        assert first.send(get("/health")).read_response().status == 200
        first.send(post(b"{}"))
        assert server.router.wait().body == b"{}"


def test_far_too_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a margin they are closed at once: sockets are bounded."""
    monkeypatch.setattr("api.app.MAX_SURPLUS_CONNECTIONS", 1)
    with ApiServer(max_connections=1) as server, server.connect() as first, server.connect() as second:
        second.send(get("/health"))
        assert second.read_response().status == 200
        with server.connect() as third, server.connect() as fourth:
            assert fourth.is_closed()
            assert third.send(get("/v1/models")).read_response().status == 503
        assert first.send(get("/health")).read_response().status == 200


def test_2000_idle_connections(server: ApiServer) -> None:
    """They cost a little memory and no time: others are served, and a sweep over all is short."""
    num_clients = 2000 if server.certificates is None else 200  # a handshake takes longer than all the rest
    clients = [server.connect() for _ in range(num_clients)]
    for client in clients[::20]:
        assert client.send(get("/health")).read_response().keeps_alive
    server.sweep(50)
    assert server.call(lambda: len(server.app.connections)) == num_clients
    server.sweep(500)
    server.wait_until_closed()
    for client in clients:
        client.close()


@NEEDS_IPV6
def test_ipv6() -> None:
    """Another family of addresses, and its form in targets and Host."""
    with ApiServer(host="::1") as server, RawClient(server.address) as client:
        request = f"GET http://[::1]:{server.address[1]}/health HTTP/1.1\r\nHost: [::1]\r\n\r\n"
        assert client.send(request.encode()).read_response().status == 200
