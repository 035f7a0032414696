"""What every channel needs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tokservice.wire.channels import ipc_endpoint


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Ends only when every socket was closed: one that a test leaves open hangs it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A fresh address; socket paths are short, and pytest's folders are not."""
    with tempfile.TemporaryDirectory(prefix="ts", dir="/tmp") as folder:
        yield ipc_endpoint(Path(folder), "s")
