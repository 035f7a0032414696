"""What a request's head decides: refusals, names that travel with it, HTTP/1.0."""

from __future__ import annotations

import pytest

from tests.helpers.api_server import ApiServer
from tests.helpers.http_client import get, post, post_head
from tokservice.wire.errors import BAD_HTTP, HEADERS_TOO_LARGE, UNSUPPORTED_ENCODING, UNSUPPORTED_TYPE


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
