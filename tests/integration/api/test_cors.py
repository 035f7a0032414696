"""What browsers are told about pages of other origins (the Fetch standard), on every kind of answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.api_server import ApiServer
from tests.helpers.http_client import Response, get, post, post_head
from tests.helpers.wait import wait_for

PAGE = "https://chat.example"
OTHER = "https://other.example:8443"
ASKING = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization,x-api-key,x-request-id")


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """Two origins are allowed; a key is needed."""
    with ApiServer(allowed_origins=(PAGE, OTHER), api_keys=(b"secret",)) as api:
        yield api


def cors(response: Response) -> dict[str, str]:
    """The headers that are about it."""
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


def readable_by(response: Response, origin: str) -> bool:
    """As a browser decides; a cache must not give the answer to a page of another origin."""
    assert response.headers["vary"] == "origin"
    assert "access-control-allow-credentials" not in response.headers
    if "access-control-allow-origin" not in response.headers:
        assert not cors(response)
        return False
    assert response.headers["access-control-expose-headers"] == "x-request-id, request-id, retry-after"
    return response.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/health", "/nowhere"])
def test_preflight(server: ApiServer, path: str) -> None:
    """Answered by this process, without a key (browsers send none), for any path: the answer itself may be a 404."""
    with server.connect() as client:
        for origin in (PAGE, OTHER):
            response = client.send(get(path, f"Origin: {origin}", *ASKING, method="OPTIONS")).read_response()
            assert (response.status, response.body) == (200, b"")
            assert readable_by(response, origin)
            assert response.headers["access-control-allow-methods"] == "GET, HEAD, POST"
            assert response.headers["access-control-allow-headers"] == "authorization,x-api-key,x-request-id"
            assert response.headers["access-control-max-age"] == "600"
            assert response.keeps_alive
    server.router.pump()
    assert not server.router.uploads


@pytest.mark.parametrize(
    "headers",
    [
        ("Origin: https://evil.example", *ASKING),
        ("Origin: https://chat.example.evil.example", *ASKING),
        ("Origin: http://chat.example", *ASKING),
        ("Origin: https://chat.example:444", *ASKING),
        ("Origin: null", *ASKING),
        ("Origin: ", *ASKING),
        ASKING,
    ],
)
def test_preflight_for_others(server: ApiServer, headers: tuple[str, ...]) -> None:
    """No word about what is allowed, and no answer without a key."""
    with server.connect() as client:
        response = client.send(get("/v1/chat/completions", *headers, method="OPTIONS")).read_response()
        assert response.status == 401
        assert not readable_by(response, "")


def test_options_that_are_no_preflight(server: ApiServer) -> None:
    with server.connect() as client:
        key = "x-api-key: secret"
        response = client.send(get("/v1/models", f"Origin: {PAGE}", key, method="OPTIONS")).read_response()
        assert response.status == 404  # as without CORS: no page was published here
        assert readable_by(response, PAGE)
        assert "access-control-allow-methods" not in response.headers


@pytest.mark.parametrize("wanted", ["x-a\x01b", "x-a;b", "a" * 5000, "é"])
def test_strange_names_of_headers_are_not_echoed(server: ApiServer, wanted: str) -> None:
    with server.connect() as client:
        headers = (
            f"Origin: {PAGE}",
            "Access-Control-Request-Method: POST",
            f"Access-Control-Request-Headers: {wanted}",
        )
        response = client.send(get("/health", *headers, method="OPTIONS")).read_response()
        assert "access-control-allow-headers" not in response.headers


def test_every_kind_of_answer(server: ApiServer) -> None:
    """Pages, plain answers, streams; errors of this process, of others and of the parser."""
    origin, key = f"Origin: {PAGE}", "Authorization: Bearer secret"
    with server.connect() as client:
        assert readable_by(client.send(get("/health", origin)).read_response(), PAGE)
        assert readable_by(client.send(get("/health", origin, method="HEAD")).read_response(head_only=True), PAGE)
        refused = client.send(post(b"{}", origin)).read_response()
        assert refused.status == 401
        assert readable_by(refused, PAGE)
        client.send(post(b"{}", origin, key))
        server.router.answer(server.router.wait(1), 429, b"{}")
        plain = client.read_response()
        assert plain.headers["retry-after"] == "1"
        assert readable_by(plain, PAGE)
        client.send(post(b"{}", origin, key))
        server.router.open_stream(server.router.wait(2))
        server.router.event(server.router.wait(2), b"data: x\n\n", last=True)
        stream = client.read_response()
        assert stream.headers["x-request-id"]
        assert readable_by(stream, PAGE)
        too_large = client.send(get("/health", origin, "a: " + "b" * 70_000)).read_response()
        assert too_large.status == 431
        assert readable_by(too_large, PAGE)


def test_a_request_that_times_out(server: ApiServer) -> None:
    with server.connect() as client:
        client.send(post_head(f"Origin: {PAGE}", "X-Api-Key: secret", "Content-Length: 5") + b"x")
        reader = server.connection_of(client)._reader
        wait_for(
            lambda: server.call(lambda: reader.arriving and reader.arriving.received_bytes), what="the body begins"
        )
        server.sweep(100)
        response = client.read_response()
        assert response.status == 408
        assert readable_by(response, PAGE)


def test_other_origins_get_answers_that_their_pages_cannot_read(server: ApiServer) -> None:
    with server.connect() as client:
        for headers in ((), ("Origin: https://evil.example",)):
            response = client.send(get("/health", *headers)).read_response()
            assert response.status == 200
            assert not readable_by(response, "https://evil.example")


def test_all_origins() -> None:
    """The answer is the same for all, so that caches may keep it: '*', no Vary, and no credentials with it."""
    with ApiServer(allowed_origins=("*",)) as server, server.connect() as client:
        for headers in ((), ("Origin: null",), (f"Origin: {PAGE}", "Cookie: a=b")):
            response = client.send(get("/health", *headers)).read_response()
            assert cors(response) == {
                "access-control-allow-origin": "*",
                "access-control-expose-headers": "x-request-id, request-id, retry-after",
            }
            assert "vary" not in response.headers
        preflight = client.send(get("/health", f"Origin: {PAGE}", *ASKING, method="OPTIONS")).read_response()
        assert preflight.headers["access-control-allow-headers"] == "authorization,x-api-key,x-request-id"


def test_off_by_default() -> None:
    with ApiServer() as server, server.connect() as client:
        response = client.send(get("/health", f"Origin: {PAGE}")).read_response()
        assert not cors(response)
        assert "vary" not in response.headers
        preflight = client.send(get("/v1/completions", f"Origin: {PAGE}", *ASKING, method="OPTIONS")).read_response()
        assert preflight.status == 405
        assert not cors(preflight)
