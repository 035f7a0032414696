"""HTTP for load generators: keep-alive connections on an asyncio loop that cost microseconds per event.

httptools parses; what arrives is counted and timed, not decoded.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

MAX_KEPT_BYTES = 16 * 1024 * 1024  # of a body that is kept whole
_USAGE = re.compile(rb'"(prompt_tokens|completion_tokens)":\s*(\d+)')


@dataclass(slots=True, eq=False)
class Answer:
    """One request and what was seen of its response. Times are those of ``time.perf_counter``; 0.0: not yet."""

    keep: bool = False  # whether the body is kept; that of an error always is
    sent_s: float = 0.0
    first_s: float = 0.0  # first event
    last_s: float = 0.0  # last event, or the end
    status: int = 0
    num_events: int = 0  # with the closing ones
    gaps_s: array[float] = field(default_factory=lambda: array("d"))  # between reads that carried events
    error: str = ""  # what kind, where there was one
    whole: bool = False
    body: bytearray = field(default_factory=bytearray)
    usage: bytes = b""  # the piece that stated it

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Prompt and output tokens: as the server's usage says, else 0 and the number of events."""
        usage = {name: int(number) for name, number in _USAGE.findall(self.usage)}
        return usage.get(b"prompt_tokens", 0), usage.get(b"completion_tokens", self.num_events)

    def take(self, data: bytes, now_s: float) -> None:
        """A piece of the body."""
        if self.keep or self.status != 200:
            self.body += data[: MAX_KEPT_BYTES - len(self.body)]
        num_events = data.count(b"data: ")
        if num_events:
            if not self.first_s:
                self.first_s = now_s
            elif now_s != self.last_s:
                self.gaps_s.append(now_s - self.last_s)
            self.last_s = now_s
            self.num_events += num_events
        # Quotes inside JSON strings are escaped, so these can only be keys.
        if b'"completion_tokens":' in data:
            self.usage = data
        if b'"error":' in data and not self.keep:
            self.error = "error event" if self.num_events else self.error


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._now_s = 0.0
        self.closed = False

    async def send(self, request: bytes, answer: Answer) -> None:
        """Send a request; fills ``answer`` as it arrives, returns once it is whole or lost."""
        self._answer = answer
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        answer.sent_s = time.perf_counter()
        self._transport.write(request)
        await self._done

    def close(self) -> None:
        """Close at once; an answer that is under way stays as it is."""
        self.closed = True
        self._answer = None
        self._transport.abort()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Bytes from the server."""
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"malformed HTTP: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self.closed = True
        self._now_s = time.perf_counter()
        self._end("closed before the end" if exc is None else kind_of(exc))

    # --- httptools callbacks

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        answer = self._answer
        if answer is not None:
            answer.status = answer.status or self._parser.get_status_code()
            answer.take(data, self._now_s)

    def on_message_complete(self) -> None:
        """The response is whole."""
        if self._answer is not None:
            self._answer.status = self._parser.get_status_code()
            self._answer.whole = True
        self._end("")
        if not self._parser.should_keep_alive():
            self.close()

    def _end(self, error: str) -> None:
        answer, self._answer = self._answer, None
        if answer is None or self._done is None:
            return
        if not answer.last_s or not answer.num_events:
            answer.last_s = self._now_s
        if answer.status >= 400:
            error = f"HTTP {answer.status}"
        answer.error = answer.error or error
        if not self._done.done():
            self._done.set_result(None)


class Target:
    """A server: where it is, how to connect, how to write requests."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """Raises ValueError for anything but an http or https URL."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http URL: {url}")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._headers = f"host: {host}:{self._port}\r\n"
        if api_key:
            self._headers += f"authorization: Bearer {api_key}\r\n"

    async def connect(self) -> Connection:
        """A new connection. Raises OSError."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        return connection

    def get(self, path: str) -> bytes:
        """A GET request."""
        return f"GET {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n".encode()

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        """A POST request of JSON."""
        data = json.dumps(body).encode()
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}content-type: application/json\r\n"
        return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data

    async def fetch(self, path: str, timeout_s: float = 10.0) -> bytes | None:
        """The body of a page; None where the server has no such page. Raises OSError or TimeoutError."""
        async with asyncio.timeout(timeout_s):
            connection = await self.connect()
            answer = Answer(keep=True)
            try:
                await connection.send(self.get(path), answer)
            finally:
                connection.close()
        if not answer.whole:
            raise ConnectionError(answer.error)
        if answer.status == 401:
            raise PermissionError("the server wants an API key (--api-key)")
        return bytes(answer.body) if answer.status == 200 else None


async def closed_loop(
    target: Target,
    requests: Iterator[bytes],
    answers: list[Answer],
    *,
    timeout_s: float | None = None,
    on_end: Callable[[Answer], None] = lambda answer: None,
) -> None:
    """One client: sends the next request as soon as the last one has ended, until there are no more.

    Its answers, unfinished ones too, are appended to ``answers``; nothing is sent twice.
    """
    connection: Connection | None = None
    try:
        for request in requests:
            answer = Answer(sent_s=time.perf_counter())
            answers.append(answer)
            try:
                async with asyncio.timeout(timeout_s):
                    if connection is None or connection.closed:
                        connection = await target.connect()
                    await connection.send(request, answer)
            except OSError as error:  # TimeoutError is one
                answer.error = kind_of(error)
                answer.last_s = answer.last_s or time.perf_counter()
                if connection is not None:
                    connection.close()
            on_end(answer)
    finally:
        if connection is not None:
            connection.close()


def kind_of(error: BaseException) -> str:
    """A failure in two words, for counting."""
    match error:
        case ConnectionResetError() | BrokenPipeError():
            return "connection reset"
        case ConnectionRefusedError():
            return "connection refused"
        case TimeoutError():
            return "timeout"
    return type(error).__name__
