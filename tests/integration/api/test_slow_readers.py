"""Clients that read slowly, or not at all: they lose nothing up to a bound, and hold nobody else up."""

from __future__ import annotations

import random

import pytest

from tests.helpers.api_server import ApiServer
from tests.helpers.api_streams import event, start_stream
from tests.helpers.http_client import get, post
from tests.helpers.wait import wait_for

KIB = 1024
MIB = 1024 * KIB


def test_write_stall_of_a_plain_response(server: ApiServer) -> None:
    """A client that asks and does not read is cut off after a while, and counted."""
    with server.connect(small_buffers=True) as client:
        client.send(post(b"{}"))
        server.router.answer(server.router.wait(), 200, b"x" * 20_000_000)
        connection = server.connection_of(client)
        wait_for(lambda: server.call(lambda: not connection._writing), what="the response is under way")
        server.sweep(0)
        server.sweep(50)
        assert server.count("http_slow_readers_total") == 0
        server.sweep(70)
        server.wait_until_closed()
        assert server.count("http_slow_readers_total") == 1


def test_a_slow_reader_of_a_plain_response(server: ApiServer) -> None:
    """Slow is not stalled: as long as some bytes leave, it goes on, and nothing is lost."""
    body = random.Random(1).randbytes(8_000_000)
    with server.connect(small_buffers=True) as client:
        client.send(post(b"{}", "Connection: close"))
        server.router.answer(server.router.wait(), 200, body)
        received = b""
        client.read_head()
        while len(received) < len(body):
            server.sweep(len(received) / 10_000)  # 50 s for each piece below
            received += client.read_exactly(min(500_000, len(body) - len(received)))
        assert received == body
        assert client.is_closed()


def test_a_slow_reader_gets_joined_deltas(server: ApiServer) -> None:
    """Below the cap nothing is lost: deltas join while the client does not read, the others are not held up."""
    with server.connect(small_buffers=True) as slow, server.connect() as quick:
        slow_stream, quick_stream = start_stream(server, slow), start_stream(server, quick, 2)
        events = [event(number, 8000) for number in range(40)]
        for data in events:
            server.router.send([(slow_stream, 0, 0, data), (quick_stream, 0, 0, b"data: q\n\n")])
        for _ in events:
            assert quick.read_chunk() == b"data: q\n\n"
        connection = server.connection_of(slow)
        assert 100 * KIB < server.call(lambda: len(connection._unsent)) <= 256 * KIB
        server.router.event(slow_stream, b"", last=True)
        assert b"".join(iter(slow.read_chunk, b"")) == b"".join(events)
        assert slow.send(get("/health")).read_response().status == 200


@pytest.mark.parametrize("rows", [1, 20])
def test_a_reader_that_stopped_is_cut_off(server: ApiServer, rows: int) -> None:
    """Output queued without bound for a client that stopped reading: codex-lb#2266. Beyond the cap: aborted at the
    router once, counted once, memory bounded, others unharmed."""
    with server.connect(small_buffers=True) as slow, server.connect() as quick:
        slow_stream, quick_stream = start_stream(server, slow), start_stream(server, quick, 2)
        for number in range(20_000 // rows):
            server.router.send([(slow_stream, 0, 0, event(number, 2000))] * rows)
            server.router.event(quick_stream, b"data: q\n\n")
            server.router.pump()
            if slow_stream.num_aborts:
                break
            assert quick.read_chunk() == b"data: q\n\n"
        server.router.event(slow_stream, b"late", last=True)
        server.router.event(quick_stream, b"data: end\n\n")
        while quick.read_chunk() != b"data: end\n\n":
            pass
        server.router.pump()
        assert slow_stream.num_aborts == 1
        assert quick_stream.num_aborts == 0
        assert server.count("http_slow_readers_total") == 1


def test_two_large_events_in_a_row_are_no_reason_to_cut_a_reader_off(server: ApiServer) -> None:
    """Each choice begins with the echo of its prompt: the second one alone was above the cap of a slow reader."""
    events = [event(number, 400 * KIB) for number in range(3)]
    with server.connect(small_buffers=True) as client:
        stream = start_stream(server, client)
        server.router.send([(stream, 0, 0, data) for data in events])
        server.router.event(stream, b"", last=True)
        assert b"".join(iter(client.read_chunk, b"")) == b"".join(events)
        assert client.send(get("/health")).read_response().status == 200
    assert server.count("http_slow_readers_total") == 0


def test_many_slow_readers_together_have_a_bound() -> None:
    """Forty clients that read nothing of reports of 31 MB filled 1.2 GB. The one that holds most is cut off, be it the
    one that asks for more; who reads, or holds little, loses nothing."""
    with ApiServer(max_unsent_total_bytes=64 * MIB) as server:
        sizes = [20 * MIB, 30 * MIB, 10 * MIB, 25 * MIB]
        clients = [server.connect(small_buffers=True) for _ in sizes]
        for number, (client, size) in enumerate(zip(clients, sizes, strict=True), 1):
            client.send(post(b"{}", "Connection: close"))
            server.router.answer(server.router.wait(number), 200, bytes(size))
        wait_for(lambda: server.count("http_requests_total", code=200) == len(sizes), what="all have begun")
        assert server.count("http_slow_readers_total") == 1
        for client, size in zip(clients, sizes, strict=True):
            if size == max(sizes):
                continue
            client.read_head()
            assert client.read_exactly(size) == bytes(size)
            assert client.is_closed()
        assert server.call(lambda: server.app.held.num_bytes) == 0
