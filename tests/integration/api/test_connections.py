"""Connections over real sockets: order, pace, timeouts, slow and vanishing clients, and the router's death."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import weakref

import pytest
import zmq

from api.app import App
from api.exchange import Exchange
from api.http_connection import PARSE_BYTES
from api.http_head import KEEPALIVE
from api.request_reader import RequestReader
from api.router_client import ROWS_PER_TURN
from tests.helpers.api_server import ApiServer, Upload, most_in_one_turn
from tests.helpers.http_client import RawClient, chunked, get, post, post_head
from tests.helpers.wait import wait_for
from tokservice.wire.errors import INTERNAL, REQUEST_TIMEOUT, ROUTER_LOST, PeerLost, sse_error
from tokservice.wire.messages import Abort, EngineLimits, Peer, ReadyFlags, Role, Topology

KIB = 1024


def start_stream(server: ApiServer, client: RawClient, number: int = 1) -> Upload:
    """A running stream, whose head the client has read."""
    client.send(post(b"{}"))
    upload = server.router.wait(number)
    server.router.open_stream(upload)
    assert client.read_head().headers["content-type"].startswith("text/event-stream")
    return upload


# --- many requests on a connection


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
        client.socket.setblocking(False)
        data = memoryview(post(b"{}") + b"".join(map(post, bodies)))
        sent = 0

        def send_what_goes() -> None:
            nonlocal sent
            try:
                while sent < len(data):
                    sent += client.socket.send(data[sent:])
            except BlockingIOError:
                pass

        first = server.router.wait() if send_what_goes() is None else None
        assert first is not None
        connection = server.connection_of(client)
        wait_for(lambda: send_what_goes() or not connection._reading, what="reading pauses")
        kept = server.call(lambda: len(connection._sent_ahead) + sum(len(item.kept) for item in connection._exchanges))
        assert kept <= 512 * KIB
        server.router.answer(first, 200, b"0")
        for number, body in enumerate(bodies, start=2):
            wait_for(
                lambda number=number: send_what_goes() or server.router.wait(number, complete=False).complete,  # type: ignore[misc]
                what="the body is at the router",
            )
            upload = server.router.wait(number)
            assert upload.body == body
            server.router.answer(upload, 200, b"%d" % number)
        client.socket.settimeout(10)
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
        client.socket.settimeout(10)
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
        client.socket.settimeout(10)
        for _ in range(200):
            assert len(client.read_response().body) == 50_000


# --- timeouts


def test_header_timeout(server: ApiServer) -> None:
    """One byte at a time does not hold a connection: the clock starts with a request's first byte."""
    with server.connect() as client:
        for byte in get("/health")[:20]:
            client.send(bytes([byte]))
            server.sweep(1)
        server.sweep(35)
        response = client.read_response()
        assert (response.status, response.body) == (408, REQUEST_TIMEOUT.body())
        assert client.is_closed()


@pytest.mark.parametrize("size", [5000, 500_000])
def test_body_timeout(server: ApiServer, size: int) -> None:
    """A body of which too little arrives ends with 408; what the router has of it is aborted once."""
    with server.connect() as client:
        client.send(post_head(f"Content-Length: {size}") + b"x")
        if size > 64 * KIB:
            upload = server.router.wait(complete=False)
        server.sweep(50)
        client.send(b"y")  # a byte now and then is not enough
        assert client.send(b"") is client
        connection = server.connection_of(client)
        wait_for(lambda: server.call(lambda: connection._reader.arriving.received_bytes) == 2, what="received")  # type: ignore[union-attr]
        server.sweep(70)
        assert client.read_response().body == REQUEST_TIMEOUT.body()
        assert client.is_closed()
        if size > 64 * KIB:
            server.router.wait_for_abort(upload)


def test_body_timeout_of_a_request_that_is_refused(server: ApiServer) -> None:
    """An answer that waited for a body which never came was never given, and the connection stayed for ever."""
    with server.connect() as client:
        client.send(post_head("Content-Length: 100", path="/nowhere") + b"x")
        server.sweep(50)
        client.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.socket.recv(1)
        client.socket.settimeout(10)
        server.sweep(70)
        response = client.read_response()
        assert (response.status, response.keeps_alive) == (404, False)
        assert client.is_closed()


def test_broken_chunks_of_a_request_that_is_refused(server: ApiServer) -> None:
    """The same by malformed bytes."""
    with server.connect() as client:
        client.send(post_head("Transfer-Encoding: chunked", path="/nowhere"))
        assert client.read_response().status == 404
        client.send(b"zzz\r\n")
        assert client.is_closed()


def test_keep_alive_timeout(server: ApiServer) -> None:
    """Longer than common proxies' pools (75 s); then closed without a word."""
    with server.connect() as used, server.connect() as fresh:
        assert used.send(get("/health")).read_response().keeps_alive
        server.sweep(100)
        assert used.send(get("/health")).read_response().keeps_alive
        assert fresh.send(get("/health")).read_response().keeps_alive
        server.sweep(200)
        assert used.send(get("/health")).read_response().keeps_alive
        assert fresh.send(get("/health")).read_response().keeps_alive
        server.sweep(330)
        assert used.is_closed()
        assert fresh.is_closed()


def test_empty_lines_do_not_hold_a_connection(server: ApiServer) -> None:
    """They may come before a request, but do not begin one."""
    with server.connect() as client:
        client.send(b"\r\n" * 100)
        server.sweep(130)
        assert client.is_closed()


def test_nobody_waits_too_long_for_an_answer(server: ApiServer) -> None:
    """While the router works, the client's silence is right: no timeout of the connection applies."""
    with server.connect() as plain, server.connect() as stream:
        upload = start_stream(server, stream)
        plain.send(post(b"{}"))
        waiting = server.router.wait(2)
        server.sweep(3000)
        server.router.event(upload, b"data: 1\n\n", last=True)
        server.router.answer(waiting, 200, b"ok")
        assert stream.read_chunk() == KEEPALIVE
        assert stream.read_chunk() == b"data: 1\n\n"
        assert plain.read_response().body == b"ok"


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


# --- slow readers of streams


def event(number: int, size: int) -> bytes:
    """One event of that size."""
    return b"data: %b\n\n" % (b"%07d " % number * (size // 8))


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


# --- clients that go


def aborted_once(server: ApiServer, upload: Upload) -> None:
    """One abort for it, and none that follows (another request is the barrier)."""
    server.router.wait_for_abort(upload)
    number = len(server.router.uploads) + 1
    with server.connect() as client:
        client.send(post(b"{}"))
        server.router.wait(number)
    assert upload.num_aborts == 1


WAYS_TO_GO = pytest.mark.parametrize("way", ["fin", "reset", "half close"])


def leave(client: RawClient, way: str) -> None:
    """As a client may."""
    if way == "half close":
        client.socket.shutdown(1)
    else:
        client.close(reset=way == "reset")


@WAYS_TO_GO
def test_gone_while_uploading(server: ApiServer, way: str) -> None:
    """Before the body is whole."""
    client = server.connect().send(post_head("Content-Length: 1000000") + b"x" * 200_000)
    upload = server.router.wait(complete=False)
    leave(client, way)
    aborted_once(server, upload)
    assert not upload.complete
    client.close()


def test_gone_before_the_router_knows(server: ApiServer) -> None:
    """A small body that is not whole is nobody's business but the connection's."""
    server.connect().send(post_head("Content-Length: 1000") + b"x").close()
    server.wait_until_closed()
    server.router.pump()
    assert not server.router.uploads


@WAYS_TO_GO
def test_gone_while_waiting_for_a_plain_answer(server: ApiServer, way: str) -> None:
    """Nothing is written that could fail: only the closing itself tells."""
    client = server.connect().send(post(b"{}"))
    upload = server.router.wait()
    leave(client, way)
    aborted_once(server, upload)
    server.router.answer(upload, 200, b"too late")
    client.close()


@WAYS_TO_GO
def test_gone_while_streaming(server: ApiServer, way: str) -> None:
    """Also in the middle of a batch; events for it are dropped."""
    client = server.connect()
    upload = start_stream(server, client)
    server.router.event(upload, b"data: 1\n\n")
    assert client.read_chunk() == b"data: 1\n\n"
    leave(client, way)
    server.router.send([(upload, 0, 0, b"data: 2\n\n")] * 50)
    aborted_once(server, upload)
    server.router.event(upload, b"data: 3\n\n", last=True)
    client.close()


def test_a_half_closed_client_that_does_not_read(server: ApiServer) -> None:
    """Closing in order would wait for it to read, a minute long, while the engine works for nobody."""
    client = server.connect(small_buffers=True)
    upload = start_stream(server, client)
    for number in range(30):
        server.router.event(upload, event(number, 8000))
    connection = server.connection_of(client)
    wait_for(lambda: server.call(lambda: not connection._writing), what="bytes wait for the client")
    client.socket.shutdown(1)
    aborted_once(server, upload)
    client.close()


def test_a_half_closed_client_still_gets_what_is_finished(server: ApiServer) -> None:
    """``printf ... | nc``: the answer to a request that needs no work is written before the end is seen."""
    with server.connect() as client:
        client.send(get("/health"))
        client.socket.shutdown(1)
        assert client.read_response().status == 200
        assert client.is_closed()


@pytest.mark.parametrize("way", ["fin", "reset"])
def test_gone_with_requests_sent_ahead(server: ApiServer, way: str) -> None:
    """The running one is aborted, those behind it are never begun."""
    client = server.connect()
    client.send(post(b"1") + post(b"2") + post(b"3"))
    upload = server.router.wait()
    leave(client, way)
    aborted_once(server, upload)
    assert [item.body for item in server.router.uploads.values()] == [b"1", b"{}"]


@pytest.mark.parametrize("way", ["fin", "reset"])
def test_gone_behind_much_that_was_sent_ahead(server: ApiServer, way: str) -> None:
    """Such a connection is not read, so that its end is not seen: the sweep asks for it."""
    client = server.connect()
    client.send(post(b"{}") + post(b"x" * 100_000))
    upload = server.router.wait()
    connection = server.connection_of(client)
    wait_for(lambda: not connection._reading, what="reading pauses")
    server.sweep(0)
    assert upload.num_aborts == 0
    client.close(reset=way == "reset")
    wait_for(lambda: server.sweep(1) or server.router.pump() or upload.num_aborts, what="aborted")
    aborted_once(server, upload)


def test_gone_at_random(server: ApiServer) -> None:
    """At any moment of 300 requests: each that is not answered is aborted, none twice, nothing is left."""
    choice = random.Random(7)
    answered = set()
    for number in range(1, 301):
        client = server.connect()
        client.send(post(b"x" * choice.choice((1, 70_000))))
        moment = choice.randrange(5)
        upload = server.router.wait(number, complete=moment > 0)
        if moment == 2:
            server.router.open_stream(upload)
            server.router.event(upload, b"data: 1\n\n")
        elif moment == 3:
            server.router.answer(upload, 200, b"ok")
            answered.add(upload.request_id)
        client.close(reset=choice.random() < 0.5)
    server.wait_until_closed()
    for upload in server.router.uploads.values():
        if upload.request_id not in answered:
            server.router.wait_for_abort(upload)
        assert upload.num_aborts <= 1
    assert server.call(lambda: server.client.num_open) == 0


# --- the router


def test_the_router_restarts(server: ApiServer) -> None:
    """What was open ends with an error that its client can read; the next request goes to the new router."""
    with server.connect() as stream, server.connect() as plain, server.connect() as uploading:
        upload = start_stream(server, stream)
        server.router.event(upload, b"data: 1\n\n")
        plain.send(post(b"{}") + post(b"ahead"))
        server.router.wait(2)
        uploading.send(post_head("Content-Length: 1000000") + b"x" * 100_000)
        server.router.wait(3, complete=False)
        old = server.router
        server.follow()
        assert stream.read_chunk() == b"data: 1\n\n"
        assert b"".join(iter(stream.read_chunk, b"")) == sse_error(ROUTER_LOST)
        assert json.loads(plain.read_response().body)["error"]["code"] == "router_restarted"
        assert plain.read_response().status == 503
        response = uploading.read_response()
        assert (response.status, response.body, response.keeps_alive) == (500, ROUTER_LOST.body(), False)
        router = server.start_router()
        for client in (stream, plain):
            client.send(post(b"again"))
        for number in (1, 2):
            router.answer(router.wait(number), 200, b"ok")
        assert [client.read_response().body for client in (stream, plain)] == [b"ok", b"ok"]
        old.close()


def test_the_last_words_of_a_router_are_heard(server: ApiServer) -> None:
    """A router that leaves ends all requests readably; what of that had arrived, but was not yet read when the
    topology said that it was gone, was thrown away: clients read of a lost router instead."""
    count = 2 * ROWS_PER_TURN + 1  # more than one turn writes out
    with contextlib.ExitStack() as clients:
        streams = [clients.enter_context(server.connect()) for _ in range(count)]
        uploads = [start_stream(server, stream, number) for number, stream in enumerate(streams, 1)]
        waiting = clients.enter_context(server.connect())
        waiting.send(post(b"{}"))
        server.router.wait(count + 1)

        def leave() -> None:
            """While the loop is busy with this, it reads nothing."""
            server.router.send([(upload, 0, ReadyFlags.LAST, b"data: bye\n\n") for upload in uploads])
            line = server.client._line
            assert line is not None
            wait_for(lambda: line.raw.socket.get(zmq.EVENTS) & zmq.POLLIN, what="it has arrived")
            server.client.follow(Topology(2, ()))

        server.call(leave)
        for stream in streams:
            assert b"".join(iter(stream.read_chunk, b"")) == b"data: bye\n\n"
        assert waiting.read_response().body == ROUTER_LOST.body()
        assert server.call(lambda: server.client.num_open) == 0


def test_answers_of_an_old_router_are_not_read(server: ApiServer) -> None:
    """Its line is closed with whatever was in it."""
    with server.connect() as client:
        client.send(post(b"{}"))
        upload = server.router.wait()
        old = server.router
        server.follow()
        with contextlib.suppress(PeerLost):
            old.answer(upload, 200, b"old")
        assert client.read_response().body == ROUTER_LOST.body()
        old.close()
        server.start_router()


def test_a_stalled_router_holds_uploads_back(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies are not read while the router is behind, and go on where they were; timeouts wait as well."""
    monkeypatch.setattr("tokservice.wire.channels.HIGH_WATER_MARK", 2)
    server.follow()
    server.router.close()
    router = server.start_router()
    body = random.Random(3).randbytes(20_000_000)
    with server.connect() as client:
        client.socket.setblocking(False)
        data = memoryview(post(body))
        sent = 0

        def send_what_goes() -> bool:
            nonlocal sent
            try:
                while sent < len(data):
                    sent += client.socket.send(data[sent:])
            except BlockingIOError:
                pass
            return sent == len(data)

        (connection,) = wait_for(lambda: server.call(lambda: tuple(server.app.connections)))
        wait_for(lambda: send_what_goes() or not connection._reading, what="reading pauses")
        assert sent < len(data)
        server.sweep(100)
        wait_for(lambda: router.pump() or send_what_goes(), 20, what="all is sent")
        upload = router.wait()
        assert upload.body == body
        router.answer(upload, 200, b"ok")
        client.socket.settimeout(10)
        assert client.read_response().body == b"ok"


def test_a_router_that_is_far_behind(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that cannot be handed on ends at once, and whole: no body may arrive with a piece missing."""
    monkeypatch.setattr("tokservice.wire.channels.HIGH_WATER_MARK", 2)
    monkeypatch.setattr("tokservice.wire.channels.OUTBOX_BYTES", 300_000)
    server.follow()
    server.router.close()
    router = server.start_router()
    bodies = [b"%02d" % number * 25_000 for number in range(40)]
    clients = [server.connect().send(post(body)) for body in bodies]
    wait_for(lambda: server.count("http_requests_total", code=500), what="some are refused")

    def arrived() -> dict[bytes, Upload]:
        router.pump()
        return {upload.body: upload for upload in router.uploads.values() if upload.complete and not upload.num_aborts}

    wait_for(lambda: len(arrived()) + server.count("http_requests_total", code=500) == 40, what="all are dealt with")
    uploads = arrived()
    assert uploads
    assert uploads.keys() <= set(bodies)
    for body, client in zip(bodies, clients, strict=True):
        if body in uploads:
            router.answer(uploads[body], 200, body)
            assert client.read_response().body == body
        else:
            assert client.read_response().body == INTERNAL.body()


def test_messages_that_mean_nothing_here(server: ApiServer) -> None:
    """Rows for unknown requests, and messages of other kinds, do no harm."""
    with server.connect() as client:
        upload = start_stream(server, client)
        ghost = Upload("api.0.1:999", 1, 0)
        server.router.send_message(Abort("x"))
        server.router.send(
            [(ghost, 200, ReadyFlags.LAST, b"{}"), (upload, 0, 0, b"data: 1\n\n"), (ghost, 200, ReadyFlags.STREAM, b"")]
        )
        server.router.send([(upload, 200, ReadyFlags.STREAM, b"data: 2\n\n")])  # opened before: the status is moot
        server.router.event(upload, b"", last=True)
        server.router.event(upload, b"after the end", last=True)
        assert b"".join(iter(client.read_chunk, b"")) == b"data: 1\n\ndata: 2\n\n"
        assert client.send(get("/health")).read_response().status == 200


def test_a_refusal_after_the_stream_was_opened_is_not_sent_as_one(server: ApiServer) -> None:
    """One response has one status."""
    with server.connect() as client:
        upload = start_stream(server, client)
        server.router.answer(upload, 500, b"{}")
        client.close()


def test_other_peers_in_the_topology_do_not_matter(server: ApiServer) -> None:
    """Only the router's identity does."""
    with server.connect() as client:
        upload = start_stream(server, client)
        server.follow(server.router.peer, Peer("engine.0.1", Role.ENGINE, ("ipc://x",), EngineLimits()))
        server.router.event(upload, b"data: 1\n\n")
        assert client.read_chunk() == b"data: 1\n\n"


# --- the loop belongs to all


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
