"""What makes tcp as private as sockets in a private directory: CURVE (rfc.zeromq.org/spec/26), and nobody but us.

All processes of a run share one key pair, made at its start. It encrypts both ways, proves to a peer that it talks
to us, and us that the peer holds the pair too: everybody else is refused in the handshake (ZAP, spec/27), before
a word of theirs reaches a process.
"""

from __future__ import annotations

import hmac
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from tokservice.wire.errors import ConfigError

HANDSHAKE_MS = 5000  # for a peer that connects; a stranger holds an open file so long
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
ZAP_DOMAIN = b"tokservice"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A key pair, each of 40 characters (Z85)."""

    public: bytes
    secret: bytes

    @classmethod
    def generate(cls) -> CurveKeys:
        """A new pair. Raises ConfigError where ZMQ was built without CURVE."""
        if not zmq.has("curve"):
            raise ConfigError("runtime.transport: tcp needs CURVE, which this build of ZMQ lacks")
        return cls(*zmq.curve_keypair())

    @classmethod
    def load(cls, path: Path) -> CurveKeys:
        """Read what ``save`` wrote."""
        return cls(*path.read_bytes().split())

    def save(self, path: Path) -> None:
        """Into a new file that nobody else can read."""
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(self.public + b"\n" + self.secret + b"\n")


class CurveContext(zmq.Context["zmq.Socket[bytes]"]):
    """A context whose sockets can speak tcp: ``secure`` comes before bind and connect."""

    keys: CurveKeys | None = None  # set at once; pyzmq takes other attributes for socket options
    is_guarded: bool = False

    def __init__(self, keys: CurveKeys) -> None:
        super().__init__()
        self.keys = keys

    def secure(self, socket: zmq.Socket[bytes], *, listens: bool) -> None:
        """Have a socket encrypt and, where it listens, admit nobody but holders of the keys."""
        assert self.keys is not None
        socket.handshake_ivl = HANDSHAKE_MS
        socket.curve_publickey, socket.curve_secretkey = self.keys.public, self.keys.secret
        if not listens:
            socket.curve_serverkey = self.keys.public
            return
        if not self.is_guarded:
            self.is_guarded = True
            self._guard()
        socket.curve_server = True
        socket.zap_domain = ZAP_DOMAIN
        socket.zap_enforce_domain = True  # should the guard be missing, nobody is admitted

    def _guard(self) -> None:
        """Start the thread that answers ZMQ's questions about peers; it ends with the context."""
        assert self.keys is not None
        public = z85.decode(self.keys.public)
        ready = threading.Event()

        def guard() -> None:
            # A context of its own, which is the same for ZMQ: else ours would close the socket under the thread.
            same: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self.underlying)
            with same.socket(zmq.REP) as questions:
                questions.linger = 0
                questions.bind(ZAP_ENDPOINT)
                ready.set()
                try:
                    while True:
                        questions.send_multipart(_verdict(questions.recv_multipart(), public))
                except zmq.ContextTerminated:
                    pass

        threading.Thread(target=guard, name="guard", daemon=True).start()
        ready.wait()


def _verdict(question: list[bytes], public: bytes) -> list[bytes]:
    """The answer to ``question``: version, request id, domain, address, identity, mechanism, credentials."""
    request_id, mechanism, credentials = question[1], question[5], question[6:]
    admitted = mechanism == b"CURVE" and len(credentials) == 1 and hmac.compare_digest(credentials[0], public)
    status, text = (b"200", b"OK") if admitted else (b"400", b"not one of us")
    return [ZAP_VERSION, request_id, status, text, b"", b""]
