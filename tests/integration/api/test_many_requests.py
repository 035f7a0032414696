"""Many requests on one connection: order, and how little of what is sent ahead or never read is kept."""

from __future__ import annotations

import contextlib
import random

import pytest

from tests.helpers.api_server import ApiServer
from tests.helpers.api_streams import start_stream
from tests.helpers.http_client import PatientSender, chunked, get, post, post_head
from tests.helpers.wait import wait_for

KIB = 1024


def test_many_requests_one_after_another(server: ApiServer) -> None:
    """Pages, plain responses and streams share a connection."""
    with server.connect() as client:
        for number in range(1, 101):
            assert client.send(get("/health")).read_response().keeps_alive
            client.send(post(b"%d" % number))
            upload = server.router.wait(number)
            if number % 2:
                server.router.answer(upload, 200, upload.body)
                assert client.read_response().body == upload.body
            else:
                server.router.open_stream(upload)
                server.router.event(upload, b"data: %b\n\n" % upload.body)
                server.router.event(upload, b"data: [DONE]\n\n", last=True)
                assert client.read_response().body == b"data: %b\n\ndata: [DONE]\n\n" % upload.body
    server.wait_until_closed()
    assert server.call(lambda: server.client.num_open) == 0


@pytest.mark.parametrize("step", [1_000_000, 7, 1000])
def test_pipelined_requests_are_answered_in_order(server: ApiServer, step: int) -> None:
    """Each is begun when the one before is answered; bodies arrive whole, whatever was sent ahead."""
    bodies = [random.Random(number).randbytes(size) for number, size in enumerate((3, 30_000, 0, 5000, 1))]
    data = b"".join(post(body) for body in bodies[:3])
    data += get("/health") + post_head("Transfer-Encoding: chunked") + chunked(bodies[3][:100], bodies[3][100:])
    data += get("/nowhere") + post(bodies[4])
    with server.connect() as client:
        for start in range(0, len(data), step):
            client.send(data[start : start + step])
        statuses = []
        for number, body in enumerate(bodies, start=1):
            upload = server.router.wait(number)
            assert len(server.router.uploads) == number
            assert upload.body == body
            server.router.answer(upload, 200 + number, b"%d" % number)
            response = client.read_response()
            assert (response.status, response.body) == (200 + number, b"%d" % number)
            if number in (3, 4):
                statuses.append(client.read_response().status)
        assert statuses == [200, 404]


def test_large_pipelined_bodies(server: ApiServer) -> None:
    """Behind an unanswered request not more than a little is read: the rest waits in the client, and loses nothing."""
    bodies = [random.Random(number).randbytes(3_000_000) for number in range(3)]
    with server.connect() as client:
        sender = PatientSender(client, post(b"{}") + b"".join(map(post, bodies)))
        sender.push()
        first = server.router.wait()
        connection = server.connection_of(client)
        wait_for(lambda: sender.push() or not connection._reading, what="reading pauses")
        kept = server.call(lambda: len(connection._sent_ahead) + sum(len(item.kept) for item in connection._exchanges))
        assert kept <= 512 * KIB
        server.router.answer(first, 200, b"0")
        for number, body in enumerate(bodies, start=2):
            wait_for(
                lambda number=number: sender.push() or server.router.wait(number, complete=False).complete,  # type: ignore[misc]
                what="the body is at the router",
            )
            upload = server.router.wait(number)
            assert upload.body == body
            server.router.answer(upload, 200, b"%d" % number)
        client.socket.settimeout(60)
        assert [client.read_response().body for _ in range(4)] == [b"0", b"2", b"3", b"4"]


def test_a_length_without_end_behind_a_running_request(server: ApiServer) -> None:
    """The body of a request whose turn had not come was kept without any limit."""
    with server.connect() as client:
        stream = start_stream(server, client)
        client.socket.setblocking(False)
        client.socket.send(post_head("Content-Length: 99999999999"))
        with contextlib.suppress(BlockingIOError):
            while True:
                client.socket.send(b"x" * 100_000)
        connection = server.connection_of(client)
        kept = server.call(lambda: sum(len(exchange.kept) for exchange in connection._exchanges))
        assert kept <= 512 * KIB
        client.socket.settimeout(60)
        server.router.event(stream, b"", last=True)
        assert client.read_chunk() == b""
        assert client.read_response().status == 413


def test_thousands_of_requests_sent_ahead(server: ApiServer) -> None:
    """All are answered, in order, and only a few of them are held as objects meanwhile."""
    with server.connect() as client:
        client.send(post(b"{}") + get("/health") * 1500 + post(b"last"))
        upload = server.router.wait()
        connection = server.connection_of(client)
        assert server.call(lambda: len(connection._exchanges)) < 200
        server.router.answer(upload, 200, b"first")
        assert client.read_response().body == b"first"
        assert {client.read_response().status for _ in range(1500)} == {200}
        server.router.answer(server.router.wait(2), 200, b"last")
        assert client.read_response().body == b"last"


def test_garbage_behind_a_request(server: ApiServer) -> None:
    """The request is served in full, however long it takes, and its client is told that the connection ends."""
    with server.connect() as client:
        client.send(post(b"{}") + b"\x00garbage")
        upload = server.router.wait()
        client.send(b"more garbage" * 10_000)
        server.sweep(50)
        server.router.answer(upload, 200, b"ok")
        response = client.read_response()
        assert (response.body, response.keeps_alive) == (b"ok", False)
        assert client.is_closed()


def test_answers_do_not_pile_up_for_a_client_that_does_not_read(server: ApiServer) -> None:
    """Pages requested without end, and never read, grew the process's memory without limit."""
    server.publish("/metrics", b"m" * 50_000)
    with server.connect(small_buffers=True) as client:
        client.socket.setblocking(False)
        try:
            for _ in range(100_000):
                client.socket.send(get("/metrics") * 10)
        except BlockingIOError:
            pass
        connection = server.connection_of(client)

        def buffered() -> int:
            return connection._transport.get_write_buffer_size() + len(connection._unsent) + len(connection._sent_ahead)

        wait_for(lambda: not connection._reading, what="reading pauses")
        assert server.call(buffered) < 1024 * KIB
        client.socket.settimeout(60)
        for _ in range(200):
            assert len(client.read_response().body) == 50_000
