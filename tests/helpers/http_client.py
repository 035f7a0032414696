"""A client that sends exactly the bytes it is told to, and reads responses strictly (RFC 9112, section 6)."""

from __future__ import annotations

import socket
import ssl
import struct
from dataclasses import dataclass
from typing import Any


@dataclass
class Response:
    """One response; header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def keeps_alive(self) -> bool:
        """What the server says about the connection."""
        return self.headers["connection"] == "keep-alive"


class TlsSocket(ssl.SSLSocket):
    """Says what a socket says where it would block, and stays readable when its sending side is closed."""

    def send(self, data: Any, flags: int = 0) -> int:
        """See ``socket.send``."""
        try:
            return super().send(data, flags)
        except ssl.SSLWantWriteError as error:
            raise BlockingIOError from error

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """See ``socket.recv``."""
        try:
            return super().recv(buflen, flags)
        except ssl.SSLWantReadError as error:
            raise BlockingIOError from error

    def shutdown(self, how: int) -> None:
        """See ``socket.shutdown``."""
        socket.socket.shutdown(self, how)


class RawClient:
    """A blocking socket; with ``tls`` its bytes are encrypted."""

    def __init__(
        self,
        address: tuple[str, int],
        *,
        receive_buffer: int = 0,
        timeout_s: float = 60.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.socket = socket.socket(family)
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(timeout_s)
        self.socket.connect(address)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=address[0])
        self._buffer = b""

    def send(self, data: bytes) -> RawClient:
        """All of it."""
        self.socket.sendall(data)
        return self

    def read_response(self, *, head_only: bool = False) -> Response:
        """The next response, whole; ``head_only`` for the answer to HEAD, or to read the body in pieces."""
        response = self.read_head()
        if not head_only:
            response.body = self._read_body(response)
        return response

    def read_head(self) -> Response:
        """Status and headers."""
        lines = self.read_until(b"\r\n\r\n")[:-4].split(b"\r\n")
        version, status, _ = lines[0].split(b" ", 2)
        assert version == b"HTTP/1.1"
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, value = line.decode("latin-1").split(": ", 1)
            assert name not in headers
            headers[name] = value
        return Response(int(status), headers, b"")

    def read_chunk(self) -> bytes:
        """One chunk of a chunked body; b'' is the last."""
        size = int(self.read_until(b"\r\n")[:-2], 16)
        return self.read_exactly(size + 2)[:-2]

    def read_until(self, end: bytes) -> bytes:
        """Up to and with ``end``."""
        while end not in self._buffer:
            self._receive()
        head, _, self._buffer = self._buffer.partition(end)
        return head + end

    def read_exactly(self, size: int) -> bytes:
        """So many bytes."""
        while len(self._buffer) < size:
            self._receive()
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def read_to_end(self) -> bytes:
        """Everything until the server closes its side, which it must do in order, without a reset."""
        while True:
            data = self.socket.recv(65536)
            if not data:
                data, self._buffer = self._buffer, b""
                return data
            self._buffer += data

    def is_closed(self) -> bool:
        """Wait until the server closes; False if it sends anything instead."""
        try:
            return self.read_to_end() == b""
        except ConnectionResetError:
            return True

    def close(self, *, reset: bool = False) -> None:
        """Leave, with FIN or with RST."""
        if reset:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_body(self, response: Response) -> bytes:
        if "transfer-encoding" in response.headers:
            assert response.headers["transfer-encoding"] == "chunked"
            assert "content-length" not in response.headers
            return b"".join(iter(self.read_chunk, b""))
        if "content-length" in response.headers:
            return self.read_exactly(int(response.headers["content-length"]))
        assert not response.keeps_alive
        return self.read_to_end()

    def _receive(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise EOFError(f"the server closed after {self._buffer!r}")
        self._buffer += data


def get(path: str, *headers: str, version: str = "1.1", method: str = "GET") -> bytes:
    """A request without a body."""
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: test", *headers, "", ""]).encode("latin-1")


def post(body: bytes, *headers: str, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    """A request with a body of stated length."""
    lines = [f"POST {path} HTTP/{version}", "Host: test", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", *headers, "", ""]).encode("latin-1") + body


def post_head(*headers: str, path: str = "/v1/completions") -> bytes:
    """The head of a request whose body (and framing) is up to the test."""
    lines = [f"POST {path} HTTP/1.1", "Host: test", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def chunked(*pieces: bytes) -> bytes:
    """A chunked body."""
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, b""))


class PatientSender:
    """Sends as much of some bytes as the other side takes, again and again, and never waits for it."""

    def __init__(self, client: RawClient, data: bytes) -> None:
        client.socket.setblocking(False)
        self._socket = client.socket
        self._data = memoryview(data)

    @property
    def is_done(self) -> bool:
        """Whether all of it is sent."""
        return not self._data

    def push(self) -> None:
        """Send what goes."""
        try:
            while self._data:
                self._data = self._data[self._socket.send(self._data) :]
        except BlockingIOError:
            pass
