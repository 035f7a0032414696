"""Clients that go, at any moment and in any way: what runs for them is aborted, once."""

from __future__ import annotations

import random

import pytest

from tests.helpers.api_server import ApiServer, Upload
from tests.helpers.api_streams import event, start_stream
from tests.helpers.http_client import RawClient, get, post, post_head
from tests.helpers.wait import wait_for

WAYS_TO_GO = pytest.mark.parametrize("way", ["fin", "reset", "half close"])


def aborted_once(server: ApiServer, upload: Upload) -> None:
    """One abort for it, and none that follows (another request is the barrier)."""
    server.router.wait_for_abort(upload)
    number = len(server.router.uploads) + 1
    with server.connect() as client:
        client.send(post(b"{}"))
        server.router.wait(number)
    assert upload.num_aborts == 1


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
    """At any moment of 100 requests: each that is not answered is aborted, none twice, nothing is left."""
    choice = random.Random(7)
    answered = set()
    for number in range(1, 101):
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
