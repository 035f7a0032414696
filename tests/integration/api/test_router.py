"""The router on the other side: it dies, restarts, falls behind, and says what means nothing."""

from __future__ import annotations

import contextlib
import json
import random

import pytest
import zmq

from api.router_client import ROWS_PER_TURN
from tests.helpers.api_server import ApiServer, Upload
from tests.helpers.api_streams import start_stream
from tests.helpers.http_client import PatientSender, get, post, post_head
from tests.helpers.wait import wait_for
from tokservice.wire.errors import INTERNAL, NOT_READY, ROUTER_LOST, PeerLost, sse_error
from tokservice.wire.messages import Abort, EngineLimits, Peer, ReadyFlags, Role, Route, Topology


def test_no_router() -> None:
    """Between two routers there is an answer too."""
    with ApiServer() as server:
        server.follow()
        with server.connect() as client:
            response = client.send(post(b"{}")).read_response()
            assert (response.status, response.body) == (503, NOT_READY.body())
            response = client.send(post(b"x" * 100_000)).read_response()
            assert response.status == 503


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
            wait_for(lambda: line.raw.socket.poll(0, zmq.POLLIN), what="it has arrived")
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
        sender = PatientSender(client, post(body))
        (connection,) = wait_for(lambda: server.call(lambda: tuple(server.app.connections)))
        wait_for(lambda: sender.push() or not connection._reading, what="reading pauses")
        assert not sender.is_done
        server.sweep(100)
        wait_for(lambda: router.pump() or sender.push() or sender.is_done, what="all is sent")
        upload = router.wait()
        assert upload.body == body
        router.answer(upload, 200, b"ok")
        client.socket.settimeout(60)
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


def test_a_piece_of_a_stream_that_was_never_opened(server: ApiServer) -> None:
    """It was written without a head before it, and the loop met an AssertionError when the body was then refused."""
    with server.connect() as client:
        client.send(post_head("Transfer-Encoding: chunked"))
        upload = server.router.wait(complete=False)
        server.router.event(upload, b"data: x\n\n", last=True)
        response = client.read_response()
        assert (response.status, response.body) == (INTERNAL.status, INTERNAL.body(Route.COMPLETIONS))
        assert client.is_closed()


def test_other_peers_in_the_topology_do_not_matter(server: ApiServer) -> None:
    """Only the router's identity does."""
    with server.connect() as client:
        upload = start_stream(server, client)
        server.follow(server.router.peer, Peer("engine.0.1", Role.ENGINE, ("ipc://x",), EngineLimits()))
        server.router.event(upload, b"data: 1\n\n")
        assert client.read_chunk() == b"data: 1\n\n"
