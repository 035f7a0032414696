"""How the processes of a run reach each other: by sockets in its private directory, or by tcp with CURVE keys.

With tcp the directory holds the keys (mode 0600) and the supervisor's address; all other addresses are told by the
topology. Plain tcp does not exist: ``channels.py`` refuses it.
"""

from __future__ import annotations

from pathlib import Path

import zmq

from tokservice.wire.channels import ipc_endpoint
from tokservice.wire.curve import CurveContext, CurveKeys

SUPERVISOR = "supervisor"
KEYS_FILE = "curve.keys"
ADDRESS_FILE = "supervisor.address"
TCP_ENDPOINT = "tcp://127.0.0.1:*"  # any free port


class Transport:
    """Owns the process's ZMQ context. ``kind`` is ``runtime.transport``."""

    def __init__(self, kind: str, run_dir: Path, *, is_supervisor: bool = False) -> None:
        """The supervisor makes the keys. Raises ConfigError where that cannot be done."""
        self._run_dir = run_dir
        self._is_tcp = kind == "tcp"
        self.context: zmq.Context[zmq.Socket[bytes]]
        if not self._is_tcp:
            self.context = zmq.Context()
            return
        keys = CurveKeys.generate() if is_supervisor else CurveKeys.load(run_dir / KEYS_FILE)
        if is_supervisor:
            keys.save(run_dir / KEYS_FILE)
        self.context = CurveContext(keys)

    def endpoint(self, name: str) -> str:
        """Where to bind the socket of that name; its channel knows where peers find it."""
        return TCP_ENDPOINT if self._is_tcp else ipc_endpoint(self._run_dir, name)

    def publish_supervisor(self, endpoint: str) -> None:
        """Tell the children to come where it is found."""
        if self._is_tcp:
            (self._run_dir / ADDRESS_FILE).write_text(endpoint)

    @property
    def supervisor(self) -> str:
        """Where the supervisor is found."""
        return (self._run_dir / ADDRESS_FILE).read_text() if self._is_tcp else ipc_endpoint(self._run_dir, SUPERVISOR)
