"""Random and mutated bytes into whole connections: nothing but valid responses and clean ends may come out.

No sockets: a transport that only keeps what is written, an application that is the real one, a router that
answers at random moments. So one sequence takes less than a millisecond.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import socket
from collections import deque

import pytest

from api.app import App
from api.http_connection import PARSE_BYTES, HttpConnection
from api.pages import Pages
from api.request_reader import LONG_BODY_BYTES
from tests.helpers.api_server import ApiServer, StubRouter
from tests.helpers.fake_connection import HIGH_WATER, FakeLoop, FakeRouter, FakeTransport, KeepingRouter
from tests.helpers.http_client import get, post
from tests.helpers.mutated_requests import mutated
from tests.helpers.strict_responses import check_responses
from tests.helpers.wait import wait_for
from tokservice.runtime.config import ApiConfig
from tokservice.runtime.metrics import Metrics

SETTINGS = ApiConfig(max_header_bytes=8192, max_body_bytes=300_000, max_unsent_bytes=100_000)
WITH_ORIGINS = dataclasses.replace(SETTINGS, allowed_origins=("https://a.example",))
LARGEST_READ = 65_536


def one_connection(seed: int) -> None:
    """A whole life, from bytes that depend on the seed alone."""
    choice = random.Random(seed)
    router = FakeRouter()
    metrics = Metrics()
    app = App(SETTINGS if seed % 2 else WITH_ORIGINS, (), router, Pages(), metrics)  # type: ignore[arg-type]
    app.date = b"Sun, 06 Nov 1994 08:49:37 GMT"
    loop = FakeLoop()
    connection = HttpConnection(app, loop)  # type: ignore[arg-type]
    transport = FakeTransport(choice, connection)
    connection.connection_made(transport)  # type: ignore[arg-type]
    data = mutated(choice)
    largest = choice.choice((1, 3, 100, 5000, LARGEST_READ))
    if len(data) > 20_000:
        largest = max(largest, 1000)
    reads_well = choice.random() < 0.7
    now_s = 0.0
    while data and not transport.closing:
        if transport.reading:
            size = choice.randrange(largest) + 1
            connection.data_received(data[:size])
            data = data[size:]
        if choice.random() < 0.5 or not transport.reading:
            router.act(choice)
        loop.turn()
        if reads_well or choice.random() < 0.2:
            transport.client_reads()
        if choice.random() < 0.05:
            now_s += choice.choice((1, 1, 20, 70))
            connection.sweep(now_s)
        check_bounds(connection, transport)
    for _ in range(choice.choice((0, 3, 30))):
        if not transport.closing:
            router.act(choice)
            loop.turn()
            transport.client_reads()
    if transport.closing:
        pass
    elif choice.random() < 0.3:
        connection.eof_received()
    elif choice.random() < 0.5:
        for later_s in (0, 40, 70, 130, 200, 300, 10_000):
            connection.sweep(now_s + later_s)
    cut = not transport.closing or bool(router.open) or not reads_well
    transport.lose()
    assert not router.open, "a request was neither answered nor aborted"
    assert not app.connections
    check_responses(bytes(transport.written), cut=cut or connection._gone)


def bodies_of(reads: list[bytes]) -> list[bytes]:
    """Those of the whole requests that a client sent."""
    router = KeepingRouter()
    app = App(SETTINGS, (), router, Pages(), Metrics())  # type: ignore[arg-type]
    app.date = b"Sun, 06 Nov 1994 08:49:37 GMT"
    loop = FakeLoop()
    connection = HttpConnection(app, loop)  # type: ignore[arg-type]
    transport = FakeTransport(random.Random(0), connection)
    connection.connection_made(transport)  # type: ignore[arg-type]
    waiting = deque(reads)
    while (waiting or loop.ready) and not transport.closing:
        if waiting and transport.reading:
            connection.data_received(waiting.popleft())
        loop.turn()
        transport.client_reads()
    transport.lose()
    return router.bodies


def check_bounds(connection: HttpConnection, transport: FakeTransport) -> None:
    """Nothing grows with what the client sends or does not read."""
    kept = sum(len(exchange.kept) for exchange in connection._exchanges)
    assert kept + len(connection._sent_ahead) <= 65_536 + LARGEST_READ + 65_536
    assert len(connection._exchanges) <= PARSE_BYTES // 16
    assert connection._unsent.num_joined <= SETTINGS.max_unsent_bytes
    reader = connection._reader
    if reader.arriving is not None and not connection._discarding:
        assert reader._head_bytes <= SETTINGS.max_header_bytes
    assert transport.buffered <= HIGH_WATER + 400_000


def test_connections() -> None:
    """15,000 lives."""
    for seed in range(15_000):
        try:
            one_connection(seed)
        except BaseException:
            print(f"seed {seed}")  # noqa: T201
            raise


@pytest.mark.parametrize("seed", [178_424, 172_898, 210_056])
def test_found_before(seed: int) -> None:
    """A request refused before its turn was begun after its refusal, once the client had read what came before."""
    one_connection(seed)


def test_the_requests_are_the_same_however_their_bytes_arrive() -> None:
    """Where a read ends decides what of a body passes by the parser. It must not decide where a request begins, or
    one request could be smuggled within another: 3,000 lives.
    """
    num_long = 0
    for seed in range(3000):
        choice = random.Random(seed)
        data = mutated(choice) + choice.choice((b"", post(b"x" * 70_000) + get("/health")))
        cuts = sorted(choice.randrange(len(data) + 1) for _ in range(choice.choice((1, 1, 3, 20))))
        reads = [data[start:end] for start, end in itertools.pairwise([0, *cuts, len(data)]) if start < end]
        bodies = bodies_of([data])
        assert bodies_of(reads) == bodies, f"seed {seed}"
        num_long += any(len(body) > LONG_BODY_BYTES for body in bodies)
    assert num_long > 50


def test_over_sockets() -> None:
    """1,500 lives against a real loop: clients that leave at any moment, in any way, and a router that answers some."""
    with ApiServer(max_body_bytes=300_000, max_unsent_bytes=50_000) as server:
        for seed in range(1500):
            choice = random.Random(seed)
            client = server.connect()
            with contextlib.suppress(OSError):
                client.socket.setblocking(choice.random() < 0.5)
                data = mutated(choice)
                client.socket.send(data[: choice.randrange(len(data) + 1)] if choice.random() < 0.4 else data)
                answer_some(server.router, choice)
                if choice.random() < 0.3:
                    client.socket.settimeout(0.01)
                    client.socket.recv(10)
                if choice.random() < 0.2:
                    client.socket.shutdown(socket.SHUT_WR)
            client.close(reset=choice.random() < 0.5)
        wait_for(lambda: server.sweep(1) or not server.call(lambda: len(server.app.connections)), what="all are closed")
        assert server.call(lambda: server.client.num_open) == 0
    # Leaving the context fails if any exception reached the loop.


def answer_some(router: StubRouter, choice: random.Random) -> None:
    """Answers of all kinds for the youngest requests, whatever became of their clients."""
    router.pump()
    for upload in list(router.uploads.values())[-3:]:
        match choice.randrange(4):
            case 0:
                router.answer(upload, 200, b"x" * choice.choice((2, 200_000)))
            case 1:
                router.open_stream(upload)
                router.event(upload, b"data: x\n\n" * choice.choice((1, 9000)))
            case 2:
                router.event(upload, b"data: x\n\n" * 1000, last=choice.random() < 0.5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(8))
def test_many_more_connections(part: int) -> None:
    """200,000 in all, none of them in the short run."""
    for seed in range(100_000 + part * 25_000, 125_000 + part * 25_000):
        try:
            one_connection(seed)
        except BaseException:
            print(f"seed {seed}")  # noqa: T201
            raise
