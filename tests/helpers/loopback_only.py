"""A fixture for client libraries that like to phone home: a name or an address beyond this machine fails the test."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@pytest.fixture
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuses whatever Python code resolves or connects to elsewhere, and says at the end what was tried."""
    tried: list[Any] = []
    resolve, connect = socket.getaddrinfo, socket.socket.connect

    def check(host: Any) -> None:
        name = host.decode() if isinstance(host, bytes) else host
        if name not in (None, *LOOPBACK):
            tried.append(name)
            raise OSError(f"a test must not reach {name}")

    def guarded_resolve(host: Any, *arguments: Any, **options: Any) -> Any:
        check(host)
        return resolve(host, *arguments, **options)

    def guarded_connect(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            check(address[0])
        connect(self, address)

    monkeypatch.setattr(socket, "getaddrinfo", guarded_resolve)
    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    yield
    assert not tried
