"""Streams through an API server, as its client and its router see them."""

from __future__ import annotations

from tests.helpers.api_server import ApiServer, Upload
from tests.helpers.http_client import RawClient, post


def start_stream(server: ApiServer, client: RawClient, number: int = 1) -> Upload:
    """A running stream, whose head the client has read."""
    client.send(post(b"{}"))
    upload = server.router.wait(number)
    server.router.open_stream(upload)
    assert client.read_head().headers["content-type"].startswith("text/event-stream")
    return upload


def event(number: int, size: int) -> bytes:
    """One event of that size."""
    return b"data: %b\n\n" % (b"%07d " % number * (size // 8))
