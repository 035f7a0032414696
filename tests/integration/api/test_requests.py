"""Requests over real sockets: routes, keys, methods, bodies, and what is refused before and while they arrive."""

from __future__ import annotations

import pytest

from api.http_head import KEEPALIVE
from tests.helpers.api_server import DATE, ApiServer
from tests.helpers.http_client import RawClient, chunked, get, post, post_head
from tokservice.wire.errors import (
    BAD_HTTP,
    BODY_TOO_LARGE,
    DRAINING,
    HEADERS_TOO_LARGE,
    INTERNAL,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    NOT_READY,
    OVERLOADED,
    TOO_MANY_CONNECTIONS,
    UNAUTHORIZED,
    UNSUPPORTED_ENCODING,
    UNSUPPORTED_TYPE,
)
from tokservice.wire.messages import Route

MAX_BODY = 300_000


# --- pages and routes


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


# --- API keys


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


# --- what is refused by the headers


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("Content-Encoding: gzip", UNSUPPORTED_ENCODING.body()),
        ("Content-Encoding: Identity", b""),
        ("X: y", b""),
    ],
)
def test_compressed_bodies(server: ApiServer, header: str, body: bytes) -> None:
    """They would have to be unpacked on this loop."""
    with server.connect() as client:
        client.send(post(b"{}", header))
        if body:
            assert client.read_response().body == body
        else:
            server.router.wait()


@pytest.mark.parametrize(
    ("content_type", "is_json"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("text/plain", False),  # what a foreign web page may send without asking
        ("application/x-www-form-urlencoded", False),
        ("application/jsonp", False),
    ],
)
def test_content_types(server: ApiServer, content_type: str, is_json: bool) -> None:
    """Only JSON, so that a web page of another origin cannot send requests from a visitor's browser."""
    with server.connect() as client:
        body = b"{}"
        client.send(f"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: {content_type}\r\n".encode())
        client.send(b"Content-Length: 2\r\n\r\n" + body)
        if is_json:
            assert server.router.wait().body == body
        else:
            response = client.read_response()
            assert (response.status, response.body) == (415, UNSUPPORTED_TYPE.body())
            assert response.keeps_alive


def test_bad_http_is_answered_and_closed(server: ApiServer) -> None:
    """Even where the first byte is wrong."""
    for data in (b"\x16\x03\x01", b"GET / HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n", b"\x00" * 100_000):
        with server.connect() as client:
            response = client.send(data).read_response()
            assert (response.status, response.body, response.keeps_alive) == (400, BAD_HTTP.body(), False)
            assert client.is_closed()


@pytest.mark.parametrize(
    "headers", [b"x: " + b"a" * 1_000_000 + b"\r\n", b"x: y\r\n" * 50_000], ids=["1 MB", "50,000 headers"]
)
def test_large_heads(server: ApiServer, headers: bytes) -> None:
    """CVE-2025-48956: the answer can be read although the client sends on, and others are served."""
    with server.connect() as client, server.connect() as other:
        client.send(b"GET /health HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n")
        response = client.read_response()
        assert (response.status, response.body) == (431, HEADERS_TOO_LARGE.body())
        assert client.is_closed()
        assert other.send(get("/health")).read_response().status == 200


def test_the_clients_request_id(server: ApiServer) -> None:
    """Echoed as a label, made safe; the router never sees it."""
    with server.connect() as client:
        response = client.send(get("/health", "X-Request-Id: a b<\x80>")).read_response()
        assert response.headers["x-request-id"] == "a_b___"
        client.send(post(b"{}", "X-Request-ID: same")).send(post(b"{}", "x-request-id: same"))
        server.router.answer(server.router.wait(1), 200, b"1")
        server.router.answer(server.router.wait(2), 200, b"2")
        for body in (b"1", b"2"):
            response = client.read_response()
            assert (response.body, response.headers["x-request-id"]) == (body, "same")
        assert "same" not in "".join(server.router.uploads)


# --- bodies


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


# --- Expect: 100-continue


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


# --- HTTP/1.0


def test_http_1_0(server: ApiServer) -> None:
    """A stream's end is told by closing; 100 Continue and chunks are unknown; keep-alive where asked for."""
    with server.connect() as client:
        client.send(get("/health", "Connection: keep-alive", version="1.0"))
        assert client.read_response().keeps_alive
        assert not client.send(get("/health", version="1.0")).read_response().keeps_alive
        assert client.is_closed()
    with server.connect() as client:
        client.send(post(b"{}", "Connection: keep-alive", "Expect: 100-continue", version="1.0"))
        upload = server.router.wait()
        server.router.open_stream(upload)
        server.router.event(upload, b"data: 1\n\n")
        head = client.read_head()
        assert not head.keeps_alive
        assert not {"content-length", "transfer-encoding"} & head.headers.keys()
        assert client.read_exactly(9) == b"data: 1\n\n"
        server.router.event(upload, b"data: 2\n\n", last=True)
        assert client.read_to_end() == b"data: 2\n\n"


def test_the_name_of_a_conversation(server: ApiServer) -> None:
    """The router hears it, of long bodies too; whatever a client writes there is made harmless, and is no label."""
    with server.connect() as client:
        for number, (name, heard) in enumerate([("chat-17", "chat-17"), ("\t\xff{}" * 100, "_" * 128), ("", "")], 1):
            client.send(post(b"{}", f"X-Session-ID: {name}"))
            upload = server.router.wait(number)
            assert upload.session.strip("_") == heard.strip("_")
            assert len(upload.session) <= 128
            server.router.answer(upload, 200, b"ok")
            assert client.read_response().headers["x-request-id"] == upload.request_id
        client.send(post_head("Content-Length: 100000", "X-Session-ID: long"))
        assert server.router.wait(4, complete=False).session == "long"


# --- silent streams


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


# --- the whole server's state


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


def test_a_piece_of_a_stream_that_was_never_opened(server: ApiServer) -> None:
    """It was written without a head before it, and the loop met an AssertionError when the body was then refused."""
    with server.connect() as client:
        client.send(post_head("Transfer-Encoding: chunked"))
        upload = server.router.wait(complete=False)
        server.router.event(upload, b"data: x\n\n", last=True)
        response = client.read_response()
        assert (response.status, response.body) == (INTERNAL.status, INTERNAL.body(Route.COMPLETIONS))
        assert client.is_closed()


def test_no_router() -> None:
    """Between two routers there is an answer too."""
    with ApiServer() as server:
        server.follow()
        with server.connect() as client:
            response = client.send(post(b"{}")).read_response()
            assert (response.status, response.body) == (503, NOT_READY.body())
            response = client.send(post(b"x" * 100_000)).read_response()
            assert response.status == 503


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


def test_ipv6() -> None:
    """Another family of addresses, and its form in targets and Host."""
    with ApiServer(host="::1") as server, RawClient(server.address) as client:
        request = f"GET http://[::1]:{server.address[1]}/health HTTP/1.1\r\nHost: [::1]\r\n\r\n"
        assert client.send(request.encode()).read_response().status == 200
