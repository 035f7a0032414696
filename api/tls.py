"""TLS under an HTTP connection (RFC 8446): to the socket a protocol, to ``HttpConnection`` a transport. API process.

Not the loop's own, for three reasons. Handshakes are public-key arithmetic, 0.2 to 5 ms each: here they run in one
thread, without the GIL, so that a flood of them does not stall the loop. A connection counts, and its time runs,
from its first moment and not from the end of its handshake. What is written is buffered once, below TLS, so that
all limits on slow readers hold as they do without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
from queue import SimpleQueue
from typing import Any

from tokservice.runtime.config import ApiConfig
from tokservice.runtime.tls import server_context
from tokservice.wire.errors import ConfigError
from tokservice.wire.messages import Buffer

TURN_BYTES = 64 * 1024  # decrypted in one turn of the loop: a tenth of a millisecond

log = logging.getLogger(__name__)


class Tls:
    """The certificate, and the thread that shakes hands; connections are made by ``protect``."""

    def __init__(self, settings: ApiConfig, loop: asyncio.AbstractEventLoop) -> None:
        """Raises ConfigError."""
        self._settings = settings
        self._loop = loop
        self._context = server_context(settings)
        self._shaking: SimpleQueue[TlsConnection | None] = SimpleQueue()
        threading.Thread(target=self._shake_hands, name="handshakes", daemon=True).start()

    def protect(self, connection: asyncio.Protocol) -> asyncio.Protocol:
        """What the loop should give a new socket to."""
        return TlsConnection(connection, self._context, self._loop, self._shaking, self._settings.header_timeout_s)

    def reload(self) -> None:
        """Read the files again, for new connections; where that fails, the old certificate stays."""
        try:
            self._context = server_context(self._settings)
        except ConfigError as error:
            log.error("the old certificate stays: %s", error)
        else:
            log.info("certificate loaded file=%s", self._settings.ssl_certfile)

    def close(self) -> None:
        """End the thread."""
        self._shaking.put(None)

    def _shake_hands(self) -> None:
        while self._shake_next():
            pass  # and nothing is left in a variable that would keep a connection alive

    def _shake_next(self) -> bool:
        connection = self._shaking.get()
        if connection is None:
            return False
        error = connection.shake_hands()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(connection.shaken, error)
        return True


class TlsConnection(asyncio.Transport, asyncio.Protocol):
    """One connection. The SSL object belongs to the thread while it shakes hands, and the socket is not read then."""

    def __init__(
        self,
        inner: asyncio.Protocol,
        context: ssl.SSLContext,
        loop: asyncio.AbstractEventLoop,
        shaking: SimpleQueue[TlsConnection | None],
        handshake_timeout_s: float,
    ) -> None:
        super().__init__()
        self._inner = inner
        self._loop = loop
        self._shaking = shaking
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._transport: asyncio.Transport
        self._timer = loop.call_later(handshake_timeout_s, self.abort)
        self._is_shaking = False  # the thread has the SSL object
        self._is_open = False  # after the handshake, until either side ends it
        self._was_open = False
        self._has_more = False  # to decrypt, in a later turn
        self._wanted = True  # by the inner protocol: more data
        self._reading = True  # from the socket
        self._turn: asyncio.Handle | None = None

    # --- for the socket (asyncio.Protocol)

    def connection_made(self, transport: Any) -> None:
        """A client connected; it counts from now on."""
        self._transport = transport
        self._inner.connection_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone, or we closed."""
        self._is_open = False
        self._timer.cancel()
        if self._turn is not None:
            self._turn.cancel()
        inner = self._inner
        del self._inner  # which refers to us: the cycle would wait for the garbage collector
        inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Ciphertext, or a part of the handshake."""
        if self._transport.is_closing():
            return
        if self._is_open:
            self._incoming.write(data)
            self._read()
        elif not self._was_open:  # else our side has ended: the rest is dropped
            self._incoming.write(data)
            self._is_shaking = True
            self._pace()
            self._shaking.put(self)

    def eof_received(self) -> bool:
        """The client has closed its sending side, with or without a word of TLS; False closes the transport."""
        return self._end()

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._inner.resume_writing()

    # --- for the HTTP connection (asyncio.Transport, as far as it is used)

    def write(self, data: Buffer) -> None:
        """Encrypt and write."""
        if not self._is_open:
            return
        rest = memoryview(data)
        try:
            while rest:  # one record at a time
                rest = rest[self._ssl.write(rest) :]
        except ssl.SSLError as error:
            self._fail(error)
            return
        self._transport.write(self._outgoing.read())

    def write_eof(self) -> None:
        """Tell the client that nothing follows; whatever it still sends is dropped."""
        self._say_goodbye()
        self._transport.write_eof()

    def close(self) -> None:
        """Close, once everything written has left."""
        self._say_goodbye()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._is_open = False
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether ``close`` or ``abort`` was called."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """No more data until ``resume_reading``."""
        self._wanted = False
        self._pace()

    def resume_reading(self) -> None:
        """Go on, in the next turn with what is already here."""
        self._wanted = True
        self._pace()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Of the socket's transport, which has the only buffer."""
        self._transport.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        """Bytes of ciphertext that have not left."""
        return self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Of the socket's transport."""
        return self._transport.get_extra_info(name, default)

    # --- for the thread

    def shake_hands(self) -> Exception | None:
        """Take a step of the handshake, as far as the client's bytes reach; the thread calls this alone."""
        try:
            self._ssl.do_handshake()
        except Exception as error:
            return error.with_traceback(None)  # which would keep us alive
        return None

    def shaken(self, error: Exception | None) -> None:
        """The thread has taken a step; None if it was the last."""
        self._is_shaking = False
        if self._transport.is_closing():
            return
        self._send()
        if error is None:
            self._is_open = self._was_open = True
            self._timer.cancel()
            self._read()  # the first request may have come with the client's last word
        elif not isinstance(error, ssl.SSLWantReadError):
            self._fail(error)
        self._pace()

    # --- private

    def _read(self) -> None:
        """Decrypt and pass on, up to a turn's share."""
        self._turn = None
        if not self._is_open:  # our side has ended since this turn was asked for
            return
        pieces = []
        num_bytes = 0
        ended = False
        self._has_more = False
        try:
            while num_bytes < TURN_BYTES:
                piece = self._ssl.read(TURN_BYTES - num_bytes)
                if not piece:  # the client's goodbye
                    ended = True
                    break
                pieces.append(piece)
                num_bytes += len(piece)
            else:
                self._has_more = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._fail(error)
            return
        self._send()  # answers of the protocol itself
        if pieces:
            self._inner.data_received(b"".join(pieces))
        if ended:
            self._end()
        self._pace()

    def _pace(self) -> None:
        """Read from the socket while what was read is dealt with, and is wanted."""
        if self._transport.is_closing():
            return
        if self._has_more and self._wanted and self._turn is None and self._is_open:
            self._turn = self._loop.call_soon(self._read)
        reading = self._wanted and not self._is_shaking and not self._has_more
        if reading != self._reading:
            self._reading = reading
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _send(self) -> None:
        if self._outgoing.pending:
            self._transport.write(self._outgoing.read())

    def _end(self) -> bool:
        """The client has ended its side; whether there is still something to be written to it."""
        if self._is_open and self._inner.eof_received():
            return True
        self.close()
        return False

    def _say_goodbye(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._has_more = False
        with contextlib.suppress(ssl.SSLError):  # it waits for the client's own goodbye; ours is written
            self._ssl.unwrap()
        self._send()

    def _fail(self, error: BaseException) -> None:
        """The protocol is broken: send the alert that says so, if there is one, and close."""
        log.debug("tls ended error=%s", error)
        self._is_open = False
        if not self._transport.is_closing():
            self._send()
            self._transport.close()
