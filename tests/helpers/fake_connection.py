"""What is around an HTTP connection, played by a test: a loop, a transport, a router that answers at random moments."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from api.exchange import Exchange
from api.http_connection import HttpConnection
from tokservice.wire.errors import OVERLOADED

HIGH_WATER = 65_536


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
            exchange.send(b"data: %b\n\n" % (b"x" * choice.choice((0, 10, 20_000, 150_000))), last=last)
        else:
            del self.open[exchange.request_id]
            if deed == 0:
                exchange.respond_error(OVERLOADED)
            else:
                exchange.respond(200, "application/json", b"y" * choice.choice((2, 2, 2, 80_000, 500_000)))


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
