"""What the process takes from the system."""

from __future__ import annotations

import resource
import socket

import pytest

from api.api_proc import _listen, _raise_file_limit


@pytest.mark.parametrize(("host", "clients"), [("::", ["::1", "127.0.0.1"]), ("127.0.0.1", ["127.0.0.1"])])
def test_listening(host: str, clients: list[str]) -> None:
    """All addresses of IPv6 are all of IPv4 too; processes share a port; none inherits the socket."""
    with _listen(host, 0) as first:
        port = first.getsockname()[1]
        for client in clients:
            socket.create_connection((client, port), timeout=5).close()
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
