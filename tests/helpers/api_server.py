"""The API process's parts in this process: on a loop in a thread, before a router that the test plays."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import uvloop
import zmq

from api.app import App
from api.http_connection import HttpConnection
from api.pages import Pages
from api.router_client import RouterClient
from api.tls import Tls
from tests.helpers.certificates import Certificates
from tests.helpers.http_client import RawClient
from tests.helpers.wait import wait_for
from tokservice.runtime.config import Config
from tokservice.runtime.metrics import Metrics
from tokservice.wire.channels import Channel, listen_router
from tokservice.wire.messages import (
    Abort,
    BodyChunk,
    EngineLimits,
    Message,
    Peer,
    Publish,
    ReadyBytes,
    ReadyFlags,
    Role,
    Submit,
    Topology,
)

T = TypeVar("T")
API = "api.0.1"
SMALL_BUFFER_BYTES = 8192
DATE = b"Sun, 06 Nov 1994 08:49:37 GMT"


@dataclasses.dataclass
class Upload:
    """A request as the router sees it."""

    request_id: str
    route: int
    content_length: int
    session: str = ""
    pieces: list[bytes] = dataclasses.field(default_factory=list)
    complete: bool = False
    num_aborts: int = 0

    @property
    def body(self) -> bytes:
        """As far as it has arrived."""
        return b"".join(self.pieces)


class StubRouter:
    """The router's side of the wire: takes what the API process sends, and answers when the test says so."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, incarnation: int) -> None:
        self.uploads: dict[str, Upload] = {}
        self.largest_piece = 0
        self.peer = Peer(f"router.0.{incarnation}", Role.ROUTER, (endpoint,), EngineLimits())
        self._channel: Channel = listen_router(context, endpoint)

    def pump(self) -> None:
        """Take in what has arrived."""
        for _, message in self._channel.receive():
            match message:
                case Submit():
                    length, session = message.content_length, message.session
                    self.uploads[message.request_id] = Upload(message.request_id, message.route, length, session)
                    self._add_body(message)
                case BodyChunk():
                    self._add_body(message)
                case Abort():
                    if message.request_id in self.uploads:  # else the request was never sent
                        self.uploads[message.request_id].num_aborts += 1

    def wait(self, num_requests: int = 1, *, complete: bool = True) -> Upload:
        """The request of that number (from 1), once it is here."""

        def arrived() -> Upload | None:
            self.pump()
            if len(self.uploads) < num_requests:
                return None
            upload = list(self.uploads.values())[num_requests - 1]
            return upload if upload.complete or not complete else None

        return wait_for(arrived, what=f"request {num_requests} is at the router")

    def wait_for_abort(self, upload: Upload) -> None:
        """Exactly one, and no other follows."""

        def aborted() -> int:
            self.pump()
            return upload.num_aborts

        wait_for(aborted, what="abort")

    def answer(self, upload: Upload, status: int, body: bytes) -> None:
        """A plain response."""
        self.send([(upload, status, ReadyFlags.LAST, body)])

    def open_stream(self, upload: Upload, status: int = 200) -> None:
        """The head of a stream."""
        self.send([(upload, status, ReadyFlags.STREAM, b"")])

    def event(self, upload: Upload, data: bytes, *, last: bool = False) -> None:
        """Bytes of a stream."""
        self.send([(upload, 0, ReadyFlags.LAST if last else ReadyFlags.NONE, data)])

    def send(self, rows: Sequence[tuple[Upload, int, int, bytes]]) -> None:
        """One message."""
        uploads, statuses, flags, pieces = zip(*rows, strict=True)
        ids = tuple(upload.request_id for upload in uploads)
        sizes = tuple(map(len, pieces))
        self.send_message(ReadyBytes(ids, statuses, tuple(map(int, flags)), sizes, frames=(b"".join(pieces),)))

    def send_message(self, message: Message) -> None:
        """Anything."""
        self._channel.send(message, API)
        while self._channel.has_unsent:
            self._channel.flush()

    def close(self) -> None:
        """Die."""
        self._channel.close()

    def _add_body(self, message: Submit | BodyChunk) -> None:
        upload = self.uploads[message.request_id]
        for frame in message.frames:
            self.largest_piece = max(self.largest_piece, len(frame))
            upload.pieces.append(bytes(memoryview(frame)))
        upload.complete = message.complete


class ApiServer:
    """A context: listens while it is entered. On leaving it fails if the loop saw an error."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        api_keys: Sequence[bytes] = (),
        certificates: Certificates | None = None,
        **settings: Any,
    ) -> None:
        if certificates is not None:
            settings["ssl_certfile"] = str(certificates.server)
        self.certificates = certificates
        config = Config()
        config = dataclasses.replace(config, api=dataclasses.replace(config.api, **settings))
        self.metrics = Metrics()
        self.pages = Pages()
        self.errors: list[dict[str, Any]] = []
        self._host = host
        self._folder = tempfile.mkdtemp(prefix="tsapi", dir="/tmp")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._process = SimpleNamespace(
            context=self._context,
            identity=API,
            config=config,
            metrics=self.metrics,
            watch=lambda channel: None,
            unwatch=lambda channel: None,
        )
        self._api_keys = api_keys
        self._num_routers = 0
        self._num_accepted = 0
        self._clients: list[RawClient] = []
        self._ready = threading.Event()
        self._loop = uvloop.new_event_loop()
        self._start_s = self._loop.time()
        self._loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self._thread = threading.Thread(target=self._run, name="api-loop")

    def __enter__(self) -> ApiServer:
        self._thread.start()
        assert self._ready.wait(60)
        self.router = self.start_router()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for client in self._clients:
            client.close()
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(60)
        self.router.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder)
        if kind is None:
            assert not self._thread.is_alive()
            assert not self.errors, self.errors

    def connect(self, *, small_buffers: bool = False) -> RawClient:
        """A new connection; closed at the end at the latest. With small buffers the system holds little of it."""
        tls = self.certificates.client_context() if self.certificates is not None else None
        client = RawClient(self.address, receive_buffer=SMALL_BUFFER_BYTES if small_buffers else 0, tls=tls)
        self._clients.append(client)
        if tls is not None:  # the client's last word of the handshake may still be on its way
            transport: Any = self.connection_of(client)._transport
            wait_for(lambda: transport._is_open, what="the server's side of the handshake")
        if small_buffers:
            connection = self.connection_of(client)
            accepted = connection._transport.get_extra_info("socket")
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER_BYTES)
        return client

    def connection_of(self, client: RawClient) -> HttpConnection:
        """The other end of a client's connection."""
        name = client.socket.getsockname()

        def find() -> HttpConnection | None:
            connections = tuple(self.app.connections)
            return next((item for item in connections if item._transport.get_extra_info("peername") == name), None)

        return wait_for(lambda: self.call(find), what="accepted")

    def start_router(self) -> StubRouter:
        """A (new) router, which the API process follows at once."""
        self._num_routers += 1
        self.router = StubRouter(self._context, f"ipc://{self._folder}/{self._num_routers}", self._num_routers)
        self.follow(self.router.peer)
        return self.router

    def follow(self, *peers: Peer) -> None:
        """A topology."""
        self.call(lambda: self.client.follow(Topology(self._num_routers, peers)))

    def publish(self, path: str, body: bytes, *, max_age_s: float = 0.0, status: int = 200) -> None:
        """A page from the supervisor."""
        message = Publish(path, status, "application/json", max_age_s, frames=(body,))
        self.call(lambda: self.pages.publish(message, time.monotonic()))

    def sweep(self, at_s: float) -> None:
        """What the timer would do so many seconds after the start; times should grow from call to call.

        It meets every client that has connected.
        """
        wait_for(lambda: self._num_accepted >= len(self._clients), what="all are accepted")

        def sweep() -> None:
            for connection in tuple(self.app.connections):
                connection.sweep(self._start_s + at_s)

        self.call(sweep)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the loop."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)

    def count(self, name: str, **labels: object) -> float:
        """A counter."""
        text = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        metrics = self.call(self.metrics.snapshot)
        return sum(metric.values[0] for metric in metrics if metric.name == name and metric.labels == text)

    def wait_until_closed(self) -> None:
        """No connection is open."""
        wait_for(lambda: not self.call(lambda: len(self.app.connections)), what="all connections are closed")

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stopped = asyncio.Event()
        self.client = RouterClient(self._loop, self._process)  # type: ignore[arg-type]
        self.app = App(self._process.config.api, self._api_keys, self.client, self.pages, self.metrics)
        self.app.date = DATE
        self.tls = Tls(self._process.config.api, self._loop) if self.certificates is not None else None
        server: Any = await self._loop.create_server(self._new_connection, self._host, 0, backlog=2048)
        self.address = server.sockets[0].getsockname()[:2]
        self._ready.set()
        await self._stopped.wait()
        server.close()
        self.client.close()
        for connection in tuple(self.app.connections):
            connection.drop()
        await asyncio.sleep(0)
        if self.tls is not None:
            self.tls.close()

    def _new_connection(self) -> asyncio.Protocol:
        self._num_accepted += 1
        connection = HttpConnection(self.app, self._loop)
        return connection if self.tls is None else self.tls.protect(connection)


def most_in_one_turn(server: ApiServer, kind: type, name: str, cause: Callable[[], None]) -> tuple[int, int]:
    """How often a method ran in all, and at most in one turn of the loop, while ``cause`` did its work."""
    counts = [0]
    handle: asyncio.Handle | None = None
    original = getattr(kind, name)

    def counted(*arguments: Any, **keywords: Any) -> Any:
        counts[-1] += 1
        return original(*arguments, **keywords)

    def tick() -> None:
        nonlocal handle
        if counts[-1]:
            counts.append(0)
        handle = server._loop.call_soon(tick)

    setattr(kind, name, counted)
    try:
        server.call(tick)
        cause()
    finally:
        server.call(lambda: handle.cancel() if handle is not None else None)
        setattr(kind, name, original)
    return sum(counts), max(counts)
