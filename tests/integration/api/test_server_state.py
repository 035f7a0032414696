"""What the whole server's state means for a request: draining, full, idle, another family of addresses."""

from __future__ import annotations

import pytest

from tests.helpers.api_server import ApiServer
from tests.helpers.http_client import RawClient, get, post, post_head
from tests.helpers.ipv6 import NEEDS_IPV6
from tokservice.wire.errors import DRAINING, TOO_MANY_CONNECTIONS


def test_draining(server: ApiServer) -> None:
    """New requests get 503 and close; running streams go on; probes are answered."""
    with server.connect() as running, server.connect() as waiting, server.connect() as late:
        upload = server.router.wait() if running.send(post(b"{}")) else None
        assert upload is not None
        server.router.open_stream(upload)
        running.read_head()
        waiting.send(post_head("Content-Length: 5") + b"12")
        server.call(lambda: setattr(server.app, "draining", True))
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
