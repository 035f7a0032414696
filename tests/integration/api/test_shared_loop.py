"""The loop belongs to all: no client's flood takes more than its share of a turn, and what is lost is freed at once."""

from __future__ import annotations

import gc
import socket
import weakref

import pytest

from api.app import App
from api.backlog import PIECE_BYTES, Backlog
from api.exchange import Exchange
from api.http_connection import PARSE_BYTES, PIECES_PER_TURN
from api.request_reader import RequestReader
from api.router_client import ROWS_PER_TURN
from tests.helpers.api_server import ApiServer, most_in_one_turn
from tests.helpers.api_streams import start_stream
from tests.helpers.http_client import chunked, get, post, post_head
from tests.helpers.wait import wait_for


def test_requests_without_pause(server: ApiServer) -> None:
    """Thousands of requests in one read were served in one turn of the loop: two seconds for everyone else."""
    with server.connect() as client:

        def flood() -> None:
            client.send(get("/health") * 3000)
            for _ in range(3000):
                client.read_response()

        assert_shared(most_in_one_turn(server, App, "begin", flood), total=3000)


def test_tiny_chunks_without_pause(server: ApiServer) -> None:
    """So were chunks of one byte each."""

    def flood() -> None:
        with server.connect() as client:  # only now: the parser looks its callbacks up once, at the beginning
            client.send(post_head("Transfer-Encoding: chunked") + chunked(*[b"a"] * 20_000))
            assert server.router.wait().body == b"a" * 20_000

    assert_shared(most_in_one_turn(server, RequestReader, "on_body", flood), total=20_000)


def test_a_large_upload(server: ApiServer) -> None:
    """libuv reads up to 32 times 256 KB of one connection in a turn: one read is enough."""

    def upload() -> None:
        with server.connect() as client:
            client.send(post(b"a" * 8_000_000))
            assert len(server.router.wait().body) == 8_000_000

    total, most = most_in_one_turn(server, RequestReader, "on_body", upload)
    assert total > most
    assert most <= 2  # the end of one share and a whole one


def test_a_batch_for_many_streams(server: ApiServer) -> None:
    """A batch has a row for each stream: it is written out over several turns, in its order."""
    with server.connect() as client:
        upload = start_stream(server, client)
        rows = [b"%d\n" % number for number in range(1000)]

        def deliver() -> None:
            server.router.send([(upload, 0, 0, row) for row in rows])
            server.router.event(upload, b"end", last=True)
            assert b"".join(iter(client.read_chunk, b"")) == b"".join(rows) + b"end"

        total, most = most_in_one_turn(server, Exchange, "send", deliver)
        assert total == 1001
        assert most <= ROWS_PER_TURN


def assert_shared(counts: tuple[int, int], *, total: int) -> None:
    """No turn did more than two slices of bytes can hold: one that was left over, one that was just read."""
    assert counts[0] == total
    assert counts[1] <= 2 * (PARSE_BYTES // len(b"1\r\na\r\n") + 1)


def test_a_lost_connection_is_freed_at_once(server: ApiServer) -> None:
    """Without a cycle, which the garbage collector would have to find while the loop waits."""
    gc.collect()
    gc.disable()
    try:
        with server.connect() as client:
            client.send(get("/health")).read_response()
            client.send(post(b"{}"))
            server.router.answer(server.router.wait(), 200, b"ok")
            client.read_response()
            reference = weakref.ref(server.connection_of(client))
        server.wait_until_closed()
        wait_for(lambda: reference() is None, what="freed")
    finally:
        gc.enable()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_large_answer_is_written_in_turns(server: ApiServer, streamed: bool) -> None:
    """Joining it to its head, and giving it to the socket as a whole, stopped the loop for 50 ms and more."""
    body = bytes(range(256)) * 20_000
    with server.connect() as client:
        if streamed:
            stream = start_stream(server, client)

        def send() -> None:
            if streamed:
                server.router.event(stream, body, last=True)
                assert b"".join(iter(client.read_chunk, b"")) == body
            else:
                client.send(post(b"{}"))
                server.router.answer(server.router.wait(), 200, body)
                assert client.read_response().body == body

        total, most = most_in_one_turn(server, Backlog, "take", send)
    assert total >= len(body) // PIECE_BYTES
    assert most <= PIECES_PER_TURN + 1


def test_a_client_that_has_ended_its_side_gets_the_whole_of_a_large_answer(server: ApiServer) -> None:
    body = bytes(5_000_000)
    with server.connect(small_buffers=True) as client:
        client.send(post(b"{}"))
        server.router.answer(server.router.wait(), 200, body)
        head = client.read_head()
        client.socket.shutdown(socket.SHUT_WR)
        assert client.read_exactly(int(head.headers["content-length"])) == body
        assert client.is_closed()
