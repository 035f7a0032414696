"""The HTTP process: pure I/O on uvloop. It moves bytes between sockets and computes nothing.

It imports no torch, tokenizers, jinja2, msgspec, orjson or pydantic.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Sequence

import uvloop

from api.app import MAX_SURPLUS_CONNECTIONS, App
from api.http_connection import HttpConnection
from api.http_head import http_date
from api.loop_lag import LoopLag
from api.pages import Pages
from api.router_client import RouterClient
from api.tls import Tls
from tokservice.runtime.metrics import Metrics
from tokservice.runtime.process import EXIT_CLEAN, Process, run_process, spare_imports
from tokservice.wire.channels import LoopChannel
from tokservice.wire.errors import DRAINING, StartupError
from tokservice.wire.messages import Message, Publish, Role, Stop, Topology

API_KEYS_VARIABLE = "TOKSERVICE_API_KEYS"  # separated by blanks or line ends; this process alone gets it
BACKLOG = 2048
SWEEP_INTERVAL_S = 1.0
FLUSH_TIMEOUT_S = 2.0
FILES_BESIDE_CONNECTIONS = 256

log = logging.getLogger(__name__)


class Api:
    """The process's parts on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, process: Process, api_keys: Sequence[bytes]) -> None:
        self._loop = loop
        self._process = process
        self._pages = Pages()
        self._router = RouterClient(loop, process)
        self._app = App(process.config.api, api_keys, self._router, self._pages, process.metrics)
        self._tls = Tls(process.config.api, loop) if process.config.api.ssl_certfile else None
        self._stopped = asyncio.Event()
        self._control: LoopChannel

    async def run(self) -> int:
        """Serve until the supervisor says stop."""
        settings = self._process.config.api
        _raise_file_limit(settings.max_connections + MAX_SURPLUS_CONNECTIONS + FILES_BESIDE_CONNECTIONS)
        self._sweep()
        self._loop.add_signal_handler(signal.SIGHUP, self._tls.reload if self._tls is not None else lambda: None)
        try:
            server = await self._loop.create_server(
                self._new_connection,
                sock=_listen(settings.host, settings.port),
                backlog=BACKLOG,
            )
        except OSError as error:
            raise StartupError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from error
        self._control = LoopChannel(self._loop, self._process.control, self._on_control)
        LoopLag(self._loop, settings.lag_heartbeat_ms / 1000, self._process.metrics)
        spare_imports()
        self._control.send(self._process.hello())
        self._beat()
        await self._stopped.wait()
        server.close()
        await self._flush()
        self._router.close()
        self._control.close()
        if self._tls is not None:
            self._tls.close()
        return EXIT_CLEAN

    def report(self, metrics: Metrics) -> tuple[int, int]:
        """For the heartbeat."""
        metrics.set("http_connections", len(self._app.connections))
        metrics.set("http_unsent_bytes", self._app.held.num_bytes)
        return self._router.num_messages, self._router.num_open

    def _new_connection(self) -> asyncio.Protocol:
        connection = HttpConnection(self._app, self._loop)
        return connection if self._tls is None else self._tls.protect(connection)

    def _on_control(self, message: Message) -> None:
        match message:
            case Topology() if message.version > self._process.topology_version:
                self._process.topology_version = message.version
                self._router.follow(message)
                self._process.beat(self.report)
            case Publish():
                self._pages.publish(message, time.monotonic())
            case Stop(drain=True):
                self._process.draining = True
                self._app.drain()
                self._process.beat(self.report)
            case Stop():
                self._stopped.set()

    def _beat(self) -> None:
        if self._stopped.is_set():
            return
        self._process.beat(self.report)
        self._control.wake()  # the beat goes straight to the socket, and may have swallowed news of a message
        if self._process.stopping:  # SIGTERM, from somebody else than the supervisor
            self._stopped.set()
        self._loop.call_later(self._process.config.runtime.heartbeat_s, self._beat)

    def _sweep(self) -> None:
        self._app.date = http_date(time.time())
        now_s = self._loop.time()
        for connection in tuple(self._app.connections):
            connection.sweep(now_s)
        self._loop.call_later(SWEEP_INTERVAL_S, self._sweep)

    async def _flush(self) -> None:
        """Answer what has not arrived, let the last bytes leave, then close what is still open."""
        for connection in tuple(self._app.connections):
            connection.refuse_arriving(DRAINING)
        deadline_s = self._loop.time() + FLUSH_TIMEOUT_S
        while self._loop.time() < deadline_s and not all(item.is_flushed for item in self._app.connections):
            await asyncio.sleep(0.01)
        for connection in tuple(self._app.connections):
            connection.close_if_idle()
        await asyncio.sleep(0)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket that other processes can share by binding it too (SO_REUSEPORT)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    dual = family is socket.AF_INET6 and socket.has_dualstack_ipv6()  # "::" takes IPv4 too
    return socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=True, dualstack_ipv6=dual)


def _raise_file_limit(wanted: int) -> None:
    """Each connection is an open file, of which the usual soft limit allows 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < wanted:
        log.warning("few open files are allowed (ulimit -n): limit=%d wanted=%d", limit, wanted)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry: ``python -m api.api_proc --config FILE``."""
    api_keys = os.environ.pop(API_KEYS_VARIABLE, "").encode().split()

    def body(process: Process) -> int:
        async def serve() -> int:
            return await Api(asyncio.get_running_loop(), process, api_keys).run()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve())

    return run_process(Role.API, argv, body)


if __name__ == "__main__":
    sys.exit(main())
