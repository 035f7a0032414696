"""Which path is served to whom: pages, routes, their methods, and API keys."""

from __future__ import annotations

import pytest

from tests.helpers.api_server import DATE, ApiServer
from tests.helpers.http_client import get, post
from tokservice.wire.errors import METHOD_NOT_ALLOWED, NOT_FOUND, UNAUTHORIZED
from tokservice.wire.messages import Route


def test_pages(server: ApiServer) -> None:
    """Pages are served as they were pushed; HEAD gets their head alone; the connection stays."""
    server.publish("/v1/models", b'{"data":[]}')
    server.publish("/v1/models/org/name", b'{"id":"org/name"}')
    with server.connect() as client:
        response = client.send(get("/v1/models?x=1")).read_response()
        assert (response.status, response.body) == (200, b'{"data":[]}')
        assert response.headers["date"] == DATE.decode()
        assert "x-request-id" not in response.headers
        head = client.send(get("/v1/models", method="HEAD")).read_response(head_only=True)
        assert (head.status, head.headers["content-length"]) == (200, "11")
        assert client.send(get("/v1/models/org%2Fname")).read_response().body == b'{"id":"org/name"}'
        assert client.send(get("http://elsewhere:1/v1/models")).read_response().status == 200
        for path in ("/v1/models/", "//v1/models", "/", "/V1/models", "*"):
            assert client.send(get(path)).read_response().body == NOT_FOUND.body()


def test_readiness_before_any_news(server: ApiServer) -> None:
    """Between listening and the supervisor's first page: not ready, which is not 404."""
    with server.connect() as client:
        assert client.send(get("/ready")).read_response().status == 503
        assert client.send(get("/health")).read_response().status == 200
        server.publish("/ready", b"{}", max_age_s=1000)
        assert client.send(get("/ready")).read_response().status == 200


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/completions", Route.COMPLETIONS),
        ("/v1/chat/completions?api-version=1", Route.CHAT_COMPLETIONS),
        ("/tokenize", Route.TOKENIZE),
        ("/detokenize", Route.DETOKENIZE),
    ],
)
def test_routes(server: ApiServer, path: str, route: Route) -> None:
    """A body goes to the router as it is, and the answer comes back as it is."""
    body = b"\xff\x00 no JSON at all"
    with server.connect() as client:
        client.send(post(body, path=path))
        upload = server.router.wait()
        assert (upload.route, upload.body, upload.content_length) == (route, body, len(body))
        server.router.answer(upload, 200, b"\x00answer")
        response = client.read_response()
        assert (response.status, response.body, response.keeps_alive) == (200, b"\x00answer", True)
        assert response.headers["x-request-id"] == upload.request_id


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "OPTIONS", "DELETE"])
def test_other_methods_on_routes(server: ApiServer, method: str) -> None:
    """405 names the methods (RFC 9110, section 15.5.6); no CORS header answers a browser's preflight."""
    with server.connect() as client:
        client.send(get("/v1/completions", "Origin: http://evil.example", method=method))
        response = client.read_response(head_only=method == "HEAD")
        assert (response.status, response.headers["allow"]) == (405, "POST")
        assert not any(name.startswith("access-control") for name in response.headers)
        assert client.send(get("/health")).read_response().status == 200


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_other_methods_on_pages(server: ApiServer, path: str) -> None:
    """The same for pages; a small body of such a request is read, and the connection stays."""
    server.publish("/metrics", b"x 1\n")
    with server.connect() as client:
        response = client.send(post(b"body", path=path)).read_response()
        assert (response.status, response.headers["allow"], response.keeps_alive) == (405, "GET, HEAD", True)
        assert response.body == METHOD_NOT_ALLOWED.body()
        assert client.send(get(path)).read_response().status == 200


@pytest.mark.parametrize("headers", [("Connection: Upgrade", "Upgrade: websocket"), ("Connection: close",)])
def test_upgrades_are_declined(server: ApiServer, headers: tuple[str, ...]) -> None:
    """Another protocol is not spoken: the request is served in this one, then the connection closes."""
    with server.connect() as client:
        response = client.send(get("/health", *headers)).read_response()
        assert (response.status, response.keeps_alive) == (200, False)
        assert client.is_closed()


def test_a_slow_answer_to_an_upgrade_request(server: ApiServer) -> None:
    """Bytes behind it were dropped under a timer that cut the running request off after five seconds."""
    with server.connect() as client:
        client.send(post(b"{}", "Connection: Upgrade", "Upgrade: h2c") + b"PRI * HTTP/2.0\r\n\r\n")
        upload = server.router.wait()
        server.sweep(50)
        server.router.answer(upload, 200, b"late")
        assert client.read_response().body == b"late"
        assert client.is_closed()


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("Bearer first", 200),
        ("Bearer second", 200),
        ("bearer second", 200),
        ("BEARER  second ", 200),
        ("Bearer third", 401),
        ("Bearer firs", 401),
        ("Bearer first second", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("first", 401),
        ("Basic first", 401),
        ("Bearer \xff\xfe", 401),
        ("", 401),
    ],
)
def test_api_keys(authorization: str, status: int) -> None:
    """Any of several; the scheme's case does not matter (RFC 9110, section 11.1)."""
    with ApiServer(api_keys=(b"first", b"second")) as server:
        server.publish("/v1/models", b"{}")
        with server.connect() as client:
            headers = (f"Authorization: {authorization}",) if authorization else ()
            response = client.send(get("/v1/models", *headers)).read_response()
            assert response.status == status
            if status == 401:
                assert response.body == UNAUTHORIZED.body()
                assert response.headers["www-authenticate"] == "Bearer"


def test_what_needs_no_key() -> None:
    """Probes need none; whether a path exists is nobody's business without one; nor is a body sent on."""
    with ApiServer(api_keys=(b"key",)) as server, server.connect() as client:
        server.publish("/metrics", b"")
        assert client.send(get("/health")).read_response().status == 200
        assert client.send(get("/metrics")).read_response().status == 200
        for path in ("/nowhere", "/health/", "/%68ealth/x", "//health"):
            assert client.send(get(path)).read_response().status == 401
        assert client.send(get("/%68ealth")).read_response().status == 200
        assert client.send(post(b"{}")).read_response().status == 401
        assert client.send(post(b"{}", "Authorization: Bearer key")) is client
        assert server.router.wait().body == b"{}"
        assert len(server.router.uploads) == 1
