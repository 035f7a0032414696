"""The whole system over tcp: the same answers, deaths included, and nothing for those who have no keys."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from tests.helpers.server import SIMULATED, Server, running_server
from tokservice.wire import codec
from tokservice.wire.messages import Abort, Stop, Submit

BODY = {"prompt": "Hello", "max_tokens": 150, "seed": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """With a log of everything."""
    settings = ("runtime.transport=tcp", "runtime.log_level=debug", "simulated.step_ms=5")
    with running_server(*SIMULATED, *(part for setting in settings for part in ("--set", setting))) as running:
        yield running


def text(server: Server) -> str:
    """Of one completion."""
    response = server.http.post("/v1/completions", json=BODY)
    assert response.status_code == 200
    return str(response.json()["choices"][0]["text"])


def ports(server: Server) -> set[int]:
    """On which the processes listen to each other; on this machine's own address alone."""
    found = set()
    for process in (server.process, *server.process.children(recursive=True)):
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip == "127.0.0.1"
                found.add(connection.laddr.port)
    return found - {int(server.url.rpartition(":")[2])}


def test_it_answers_as_it_does_elsewhere(server: Server) -> None:
    """Long bodies, streams, and the death of each kind of worker."""
    right = text(server)
    assert not [path for path in server.run_dir.iterdir() if path.is_socket()]
    long = {"prompt": "word " * 200_000, "max_tokens": 1}
    assert server.http.post("/v1/completions", json=long).status_code == 200
    for role in ("tokenizer", "engine", "detokenizer"):
        with server.begun_stream(BODY) as lines:
            os.kill(server.pid(role), signal.SIGKILL)
            events = list(lines)
        assert "data: [DONE]" in events
        assert text(server) == right
    server.wait_until_status("/ready", 200)


def test_strangers(server: Server) -> None:
    """At every port: raw bytes, and messages that would be orders, from peers of all kinds without keys."""
    right = text(server)
    choice = random.Random(1)
    listening = ports(server)
    assert len(listening) == 5  # supervisor, router (two), engine, detokenizer
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    strangers: list[zmq.Socket[bytes]] = []
    orders = [codec.encode(message) for message in (Stop(drain=False), Abort("api.0.1:1"), Submit("x", 1, -1, False))]
    for port in listening:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(choice.randbytes(choice.randrange(1, 500)))
        for kind, identity in ((zmq.DEALER, b"engine.0.1"), (zmq.DEALER, b"supervisor"), (zmq.PUSH, b"x")):
            stranger = context.socket(kind)
            strangers.append(stranger)
            stranger.routing_id = identity
            stranger.connect(f"tcp://127.0.0.1:{port}")
            with contextlib.suppress(zmq.Again):  # it has been turned away already
                for order in orders:
                    stranger.send_multipart([bytes(memoryview(frame)) for frame in order], zmq.NOBLOCK)
    pids = server.pids()
    for _ in range(3):
        assert text(server) == right
    assert server.pids() == pids
    assert server.gauge("malformed_messages_total") == 0  # nothing of it came as far as that
    for stranger in strangers:
        stranger.close(linger=0)
    context.term()


def test_the_secret_stays_in_its_file(server: Server) -> None:
    server.wait_until_status("/ready", 200)
    _, secret = (server.run_dir / "curve.keys").read_text().split()
    for path in server.run_dir.iterdir():
        assert path.name == "curve.keys" or secret not in path.read_text()
    for process in (server.process, *server.process.children(recursive=True)):
        assert secret not in " ".join(process.cmdline())
        assert secret not in Path(f"/proc/{process.pid}/environ").read_text()
    assert secret not in server.log
