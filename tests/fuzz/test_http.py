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
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from api.app import App
from api.exchange import Exchange
from api.http_connection import PARSE_BYTES, HttpConnection
from api.pages import Pages
from api.request_reader import LONG_BODY_BYTES
from tests.helpers.api_server import ApiServer, StubRouter
from tests.helpers.http_client import chunked, get, post, post_head
from tests.helpers.wait import wait_for
from tokservice.runtime.config import ApiConfig
from tokservice.runtime.metrics import Metrics
from tokservice.wire.errors import OVERLOADED

SETTINGS = ApiConfig(max_header_bytes=8192, max_body_bytes=300_000, max_unsent_bytes=100_000)
WITH_ORIGINS = dataclasses.replace(SETTINGS, allowed_origins=("https://a.example",))
HIGH_WATER = 65_536
LARGEST_READ = 65_536

SEEDS = [
    get("/health"),
    get("/v1/models?x=%20", "X-Request-Id: abc", "Accept: */*"),
    get("/metrics", method="OPTIONS"),
    get("http://host:80/health", version="1.0"),
    get("/health", "Connection: Upgrade", "Upgrade: websocket"),
    post(b'{"prompt":"x"}'),
    post(b"x" * 70_000),
    post(b"{}", "Connection: Upgrade", "Upgrade: h2c"),
    post(b"{}", "Expect: 100-continue", "Connection: close"),
    post(b"{}", "Content-Encoding: gzip"),
    post(b"{}", path="/nowhere"),
    post_head("Transfer-Encoding: chunked") + chunked(b"{", b"x" * 5000, b"}"),
    post_head("Transfer-Encoding: chunked") + b"2;a=b\r\n{}\r\n0\r\nTrailer: x\r\n\r\n",
    post_head("Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
    post_head("Content-Length: 400000") + b"x" * 2000,
    get("/health", *(f"h{number}: {number}" for number in range(300))),
    get("/health", "a: " + "b" * 9000),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
    b"\r\n\r\n",
]
TOKENS = (
    b"\r\n|\n|\r|\0| |\t|:|\r\n\r\n|HTTP/1.1|HTTP/1.0|chunked|0\r\n\r\n|Content-Length: |99999999999999999999|-1|\xff|"
    b"Transfer-Encoding: chunked\r\n|Host: a\r\n|Connection: close\r\n|Upgrade: h2c\r\n|Expect: 100-continue\r\n|"
    b"GET |POST |HEAD /health HTTP/1.1\r\n"
).split(b"|")


@dataclass
class FakeLoop:
    """Turns are taken when the test says so."""

    ready: deque[Callable[[], None]] = field(default_factory=deque)

    def time(self) -> float:
        return 0.0

    def call_soon(self, callback: Callable[[], None]) -> FakeLoop:
        assert callback not in self.ready
        self.ready.append(callback)
        return self

    def cancel(self) -> None:
        """The handle's: there is only one at a time."""
        self.ready.clear()

    def turn(self) -> None:
        """What has been planned so far."""
        for _ in range(len(self.ready)):
            self.ready.popleft()()


@dataclass
class FakeTransport:
    """What uvloop's transport does, as far as connections see it: the client reads at random."""

    choice: random.Random
    connection: HttpConnection | None = None
    written: bytearray = field(default_factory=bytearray)
    buffered: int = 0
    paused: bool = False  # writing
    reading: bool = True
    eof: bool = False
    closing: bool = False
    lost: bool = False

    def set_write_buffer_limits(self, high: int) -> None:
        assert high == HIGH_WATER

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def get_extra_info(self, name: str) -> FakeTransport:
        assert name == "socket"
        return self

    def getsockopt(self, *_: int) -> bytes:
        return b"\x01"  # established

    def write(self, data: bytes) -> None:
        assert not self.lost, "written after the connection was lost"
        assert not self.eof, "written after the end"
        if self.closing:
            return
        self.written += data
        self.buffered += len(data)
        if self.buffered > HIGH_WATER and not self.paused:
            self.paused = True
            assert self.connection is not None
            self.connection.pause_writing()

    def write_eof(self) -> None:
        assert not self.lost
        self.eof = True

    def pause_reading(self) -> None:
        assert self.reading
        assert not self.lost
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        assert not self.lost
        self.reading = True

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True
        self.buffered = 0

    def client_reads(self) -> None:
        """All that is buffered."""
        self.buffered = 0
        if self.paused and not self.lost:
            self.paused = False
            assert self.connection is not None
            self.connection.resume_writing()

    def lose(self) -> None:
        """The loop's next turn after an end."""
        if not self.lost:
            self.lost = True
            assert self.connection is not None
            self.connection.connection_lost(None)


@dataclass
class FakeRouter:
    """Answers when it is told to; checks that every request ends exactly once."""

    open: dict[str, Exchange] = field(default_factory=dict)
    num_submitted: int = 0
    held_bytes: int = 0

    def submit(self, exchange: Exchange, *, whole: bool) -> None:
        assert not exchange.request_id
        self.num_submitted += 1
        exchange.request_id = f"r{self.num_submitted}"
        self.open[exchange.request_id] = exchange
        assert exchange.complete or not whole
        if whole:
            assert all(0 < len(frame) <= 65_536 for frame in exchange.kept.take())

    def body_chunk(self, exchange: Exchange) -> None:
        if exchange.request_id in self.open:
            frames = exchange.kept.take()
            assert frames or exchange.complete
            assert all(0 < len(frame) <= 65_536 for frame in frames)

    def abort(self, exchange: Exchange) -> None:
        self.open.pop(exchange.request_id, None)

    def act(self, choice: random.Random) -> None:
        """Something that a router may do."""
        if not self.open:
            return
        exchange = choice.choice(list(self.open.values()))
        deed = choice.randrange(6)
        if not exchange.complete and deed:
            return
        if exchange.started or deed in (3, 4):
            exchange.open_stream(200)
            last = choice.random() < 0.4
            if last:
                del self.open[exchange.request_id]
            exchange.send(b"data: %b\n\n" % (b"x" * choice.choice((0, 10, 20_000))), last=last)
        else:
            del self.open[exchange.request_id]
            if deed == 0:
                exchange.respond_error(OVERLOADED)
            else:
                exchange.respond(200, "application/json", b"y" * choice.choice((2, 2, 2, 80_000)))


@dataclass
class KeepingRouter(FakeRouter):
    """Keeps the bodies of whole requests, which it answers at once."""

    bodies: list[bytes] = field(default_factory=list)
    _arriving: dict[str, bytearray] = field(default_factory=dict)

    def submit(self, exchange: Exchange, *, whole: bool) -> None:
        self.num_submitted += 1
        exchange.request_id = f"r{self.num_submitted}"
        self.open[exchange.request_id] = exchange
        self._arriving[exchange.request_id] = bytearray()
        if whole:
            self.body_chunk(exchange)

    def body_chunk(self, exchange: Exchange) -> None:
        self._arriving[exchange.request_id] += b"".join(exchange.kept.take())
        if exchange.complete and self.open.pop(exchange.request_id, None) is not None:
            self.bodies.append(bytes(self._arriving.pop(exchange.request_id)))
            exchange.respond(200, "application/json", b"{}")


def check_responses(data: bytes, *, cut: bool) -> int:
    """Read responses strictly; returns how many. ``cut``: the last may be incomplete."""
    number = position = 0
    while position < len(data):
        end = data.find(b"\r\n\r\n", position)
        if end < 0:
            assert cut
            break
        lines = data[position:end].split(b"\r\n")
        position = end + 4
        version, status, _ = lines[0].split(b" ", 2)
        assert version == b"HTTP/1.1"
        assert 100 <= int(status) < 600
        if status == b"100":
            assert len(lines) == 1
            continue
        headers = dict(line.split(b": ", 1) for line in lines[1:])
        assert len(headers) == len(lines) - 1
        number += 1
        if b"transfer-encoding" in headers:
            position, whole = _skip_chunks(data, position)
        elif b"content-length" in headers:
            size = int(headers[b"content-length"])
            if data[position : position + 9] == b"HTTP/1.1 ":  # the answer to HEAD, since bodies hold no such bytes
                size = 0
            whole = len(data) - position >= size or data[position:] == b""
            position += size
        else:
            assert headers[b"connection"] == b"close"
            return number
        assert whole or cut
        if headers[b"connection"] == b"close":
            assert position >= len(data), "bytes after the last response"
    return number


def _skip_chunks(data: bytes, position: int) -> tuple[int, bool]:
    while True:
        end = data.find(b"\r\n", position)
        if end < 0:
            return len(data), False
        size = int(data[position:end], 16)
        position = end + 2 + size + 2
        if position > len(data):
            return len(data), False
        assert data[position - 2 : position] == b"\r\n"
        if not size:
            return position, True


def mutated(choice: random.Random) -> bytes:
    """A few requests, with some bytes changed."""
    data = bytearray(b"".join(choice.choice(SEEDS) for _ in range(choice.choice((1, 1, 1, 2, 3, 8)))))
    if choice.random() < 0.02:
        return choice.randbytes(choice.randrange(5000))
    if choice.random() < 0.05:
        data = data * choice.randrange(2, 40)
    for _ in range(choice.choice((0, 0, 1, 1, 2, 5, 20))):
        start = choice.randrange(len(data) + 1) if choice.random() < 0.3 else choice.randrange(min(300, len(data)) + 1)
        match choice.randrange(4):
            case 0:
                data[start : start + 1] = choice.randbytes(1)
            case 1:
                data[start:start] = choice.choice(TOKENS)
            case 2:
                del data[start : start + choice.choice((1, 2, 10, 100))]
            case 3:
                data[start:start] = data[start : start + choice.choice((1, 10, 200))]
    return bytes(data)


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
    assert len(connection._unsent) <= SETTINGS.max_unsent_bytes
    reader = connection._reader
    if reader.arriving is not None and not connection._discarding:
        assert reader._head_bytes <= SETTINGS.max_header_bytes
    assert transport.buffered <= HIGH_WATER + 400_000


def test_connections() -> None:
    """20,000 lives, or 20 seconds of them."""
    deadline_s = time.monotonic() + 20
    for seed in range(20_000):
        try:
            one_connection(seed)
        except BaseException:
            print(f"seed {seed}")  # noqa: T201
            raise
        if time.monotonic() > deadline_s:
            assert seed > 2000
            return


@pytest.mark.parametrize("seed", [178_424, 172_898, 210_056])
def test_found_before(seed: int) -> None:
    """A request refused before its turn was begun after its refusal, once the client had read what came before."""
    one_connection(seed)


def test_the_requests_are_the_same_however_their_bytes_arrive() -> None:
    """Where a read ends decides what of a body passes by the parser. It must not decide where a request begins, or
    one request could be smuggled within another: 3,000 lives, or 20 seconds of them.
    """
    deadline_s = time.monotonic() + 20
    num_long = 0
    for seed in range(3000):
        choice = random.Random(seed)
        data = mutated(choice) + choice.choice((b"", post(b"x" * 70_000) + get("/health")))
        cuts = sorted(choice.randrange(len(data) + 1) for _ in range(choice.choice((1, 1, 3, 20))))
        reads = [data[start:end] for start, end in itertools.pairwise([0, *cuts, len(data)]) if start < end]
        bodies = bodies_of([data])
        assert bodies_of(reads) == bodies, f"seed {seed}"
        num_long += any(len(body) > LONG_BODY_BYTES for body in bodies)
        if time.monotonic() > deadline_s:
            break
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
