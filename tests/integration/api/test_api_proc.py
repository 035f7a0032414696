"""What the process takes from the system."""

from __future__ import annotations

import asyncio
import resource
import socket
import tempfile
from pathlib import Path

import pytest

from api.api_proc import _listen, _raise_file_limit
from api.router_client import RouterClient
from tests.helpers.ipv6 import NEEDS_IPV6
from tokservice.runtime.config import Config, save
from tokservice.runtime.process import CONFIG_FILE, Process, ProcessName
from tokservice.wire.channels import ipc_endpoint, listen_router
from tokservice.wire.messages import EngineLimits, Peer, Role, Topology

BOTH_FAMILIES = [
    pytest.param("::", ["::1", "127.0.0.1"], marks=NEEDS_IPV6),
    ("127.0.0.1", ["127.0.0.1"]),
]


@pytest.mark.parametrize(("host", "clients"), BOTH_FAMILIES)
def test_listening(host: str, clients: list[str]) -> None:
    """All addresses of IPv6 are all of IPv4 too; processes share a port; none inherits the socket."""
    with _listen(host, 0) as first:
        port = first.getsockname()[1]
        for client in clients:
            socket.create_connection((client, port), timeout=60).close()
        with _listen(host, port) as second:
            assert second.getsockname()[1] == port
        assert not first.get_inheritable()


def test_a_file_for_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the usual soft limit of 1024 a server of 4096 connections would end at a quarter of them."""
    limits = {"now": (1024, 8192)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.update(now=limit))
    _raise_file_limit(4416)
    assert limits["now"] == (4416, 8192)
    _raise_file_limit(2000)
    assert limits["now"] == (4416, 8192)
    _raise_file_limit(100_000)
    assert limits["now"] == (8192, 8192)
    limits["now"] = (1024, resource.RLIM_INFINITY)
    _raise_file_limit(100_000)
    assert limits["now"] == (100_000, resource.RLIM_INFINITY)
    limits["now"] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    _raise_file_limit(100_000)
    assert limits["now"] == (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


async def _malformed(run_dir: Path) -> list[float]:
    """What the process has counted while the line is open, and after its router has died."""
    process = Process(ProcessName(Role.API, 0, 1), run_dir)
    endpoint = ipc_endpoint(run_dir, "router")
    client = RouterClient(asyncio.get_running_loop(), process)
    counted = []

    def count() -> float:
        process.beat(lambda metrics: (0, 0))
        return next(item.values[0] for item in process.metrics.snapshot() if item.name == "malformed_messages_total")

    with listen_router(process.context, endpoint) as router:
        client.follow(Topology(1, (Peer("router.0.1", Role.ROUTER, (endpoint,), EngineLimits()),)))
        async with asyncio.timeout(60):
            while not router.socket.poll(0):  # the line is up once something has come over it
                client._line.channel.send(Topology(1, ()))  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
            router.socket.send_multipart([process.identity.encode(), b"\xff\x00", b"nonsense"])
            while not count():
                await asyncio.sleep(0.01)
        counted.append(count())
        client.follow(Topology(2, ()))
        counted.append(count())
    process.close()
    return counted


def test_malformed_messages_of_the_router_are_counted() -> None:
    """Those on the API process's line to the router were missing from the metric."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        save(Config(), Path(folder) / CONFIG_FILE)
        assert asyncio.run(_malformed(Path(folder))) == [1.0, 1.0]
