"""Request targets and response heads."""

from __future__ import annotations

from typing import Any

import pytest

from api.http_head import chunk, http_date, request_path, response_head, safe_label

DATE = b"Sun, 06 Nov 1994 08:49:37 GMT"


def head(status: int = 200, *, content_length: int | None = 2, label: bytes = b"", **others: Any) -> list[str]:
    """The lines of a head."""
    options = {"chunked": False, "keep_alive": True} | others
    data = response_head(status, "application/json", content_length=content_length, label=label, date=DATE, **options)
    assert data.endswith(b"\r\n\r\n")
    assert b"\n" not in data.replace(b"\r\n", b"")
    return data[:-4].decode("ascii").split("\r\n")


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/v1/models", "/v1/models"),
        (b"/v1/models?limit=2&after=/x?y", "/v1/models"),
        (b"/v1/models/", "/v1/models/"),
        (b"//v1/models", "//v1/models"),
        (b"//evil.example/v1/models", "//evil.example/v1/models"),
        (b"/v1/%6dodels", "/v1/models"),
        (b"/v1/models/org%2Fname", "/v1/models/org/name"),
        (b"/v1/models/%C3%A4", "/v1/models/ä"),
        (b"/%ff%zz%", "/\ufffd%zz%"),
        (b"/health%00", "/health\0"),
        (b"/health%3Fx", "/health?x"),
        (b"http://host:8000/v1/models?x", "/v1/models"),
        (b"HTTPS://[::1]:8000/v1/models", "/v1/models"),
        (b"http://host", "/"),
        (b"http://host?x", "/"),
        (b"*", "*"),
        (b"host:443", "host:443"),
        (b"/http://host/health", "/http://host/health"),
    ],
)
def test_request_path(target: bytes, path: str) -> None:
    """Query, host and percent signs go; nothing else is made alike."""
    assert request_path(target) == path


def test_head_of_a_plain_response() -> None:
    """The length is stated once, and the connection's fate."""
    assert head(label=b"r1") == [
        "HTTP/1.1 200 OK",
        f"date: {DATE.decode()}",
        "content-type: application/json",
        "x-request-id: r1",
        "content-length: 2",
        "connection: keep-alive",
    ]


def test_head_of_a_stream() -> None:
    """Chunked where the client knows it, else until the connection closes; never both length and chunks."""
    lines = head(content_length=None, chunked=True)
    assert "transfer-encoding: chunked" in lines
    assert not any(line.startswith("content-length") for line in lines)
    assert "cache-control: no-cache" in lines
    assert "x-accel-buffering: no" in lines
    lines = head(content_length=None, keep_alive=False)
    assert not any(line.startswith(("content-length", "transfer-encoding")) for line in lines)
    assert lines[-1] == "connection: close"


@pytest.mark.parametrize("status", [429, 503])
def test_later_is_said_when(status: int) -> None:
    """Clients back off where they are told how long."""
    assert "retry-after: 1" in head(status)
    assert "retry-after: 1" not in head(200)


def test_what_a_status_demands() -> None:
    """RFC 9110: 401 names the scheme, 405 the methods."""
    assert "www-authenticate: Bearer" in head(401)
    assert "allow: GET, HEAD" in head(405, allow=b"GET, HEAD")


@pytest.mark.parametrize(("status", "line"), [(431, "Request Header Fields Too Large"), (499, "Client Closed Request")])
def test_reasons(status: int, line: str) -> None:
    """Standard phrases, and nginx's for a client that has gone."""
    assert head(status)[0] == f"HTTP/1.1 {status} {line}"


def test_an_unknown_status_still_makes_a_status_line() -> None:
    """A worker's choice of status must not end this process."""
    assert head(599)[0] == "HTTP/1.1 599 Unknown"


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        (b"req-1.a:b_C", b"req-1.a:b_C"),
        (b"a\r\nset-cookie: x", b"a__set-cookie:_x"),
        (b"\x00\xff\t ", b"____"),
        (b"x" * 1000, b"x" * 128),
        (b"", b""),
    ],
)
def test_a_clients_id_cannot_inject(given: bytes, echoed: bytes) -> None:
    """Whatever the id holds, it stays within its header's value and within one log line."""
    assert safe_label(given) == echoed


def test_chunk() -> None:
    """Sizes are hexadecimal; buffers are taken as they are."""
    assert chunk(b"x" * 31) == b"1f\r\n" + b"x" * 31 + b"\r\n"
    assert chunk(memoryview(b"abc")[1:]) == b"2\r\nbc\r\n"


def test_date() -> None:
    """RFC 9110's own example."""
    assert http_date(784111777) == DATE
