"""The only file that creates ZMQ sockets: pattern, bind side, high-water mark and linger of each.

| hop                                             | here               | bound by    |
| ----------------------------------------------- | ------------------ | ----------- |
| api, workers -> router; every process -> supervisor | ``dealer`` -> ``listen_router`` | router; supervisor |
| tokenizer -> engine; engine -> detokenizer      | ``push`` -> ``listen_pull`` | receiver    |

No send blocks: what a full socket refuses waits in an outbox of bounded size, and beyond that ``send`` refuses:
what is already kept stays, in its order, so that nothing that was taken is ever missing in between. No read is
unbounded: ``receive`` returns after so many messages or bytes. A channel belongs to one thread.

Addresses are ipc, or, from a context with keys (``curve.py``), tcp; there is no other way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from tokservice.wire import codec
from tokservice.wire.curve import CurveContext
from tokservice.wire.errors import ConfigError, PeerLost, WireError
from tokservice.wire.messages import Buffer, Message

if TYPE_CHECKING:  # most processes have no event loop: importing it is a tenth of their start
    import asyncio

HIGH_WATER_MARK = 1000  # messages, for each direction of each pipe
OUTBOX_BYTES = 64 * 1024 * 1024  # beyond the pipe, for each peer
MAX_MESSAGE_BYTES = 256 * 1024 * 1024  # of one frame
MAX_IPC_PATH_BYTES = 107  # sun_path of a UNIX socket address, less its final NUL
COPY_BELOW_BYTES = 16 * 1024  # smaller frames become bytes, larger ones stay in ZMQ's memory
TURN_MESSAGES = 64
TURN_BYTES = 1024 * 1024
DONE = object()
_MORE = zmq.NOBLOCK | zmq.SNDMORE


def ipc_endpoint(run_dir: Path, name: str) -> str:
    """The address of a socket in the run directory. Raises ConfigError where the path is too long."""
    path = run_dir / name
    if len(str(path).encode()) > MAX_IPC_PATH_BYTES:
        raise ConfigError(f"runtime.run_dir: {path} is longer than the {MAX_IPC_PATH_BYTES} bytes of a socket path")
    return f"ipc://{path}"


class Channel:
    """One socket that carries messages. ``num_malformed`` counts messages that were dropped as malformed."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, peer: str = "") -> None:
        self._context = context
        self.socket = context.socket(kind)
        self.socket.linger = 0
        self.socket.sndhwm = self.socket.rcvhwm = HIGH_WATER_MARK
        self.socket.maxmsgsize = MAX_MESSAGE_BYTES
        # Larger frames are lent to ZMQ, which tells a Python thread when it is done with each: that thread would take
        # the GIL from an event loop for every piece of body.
        self.socket.copy_threshold = codec.MAX_CHUNK_BYTES + 1
        self.num_malformed = 0
        self._routed = kind == zmq.ROUTER
        self._peer = peer
        self._outboxes: dict[str, deque[list[Buffer]]] = {}
        self._outbox_bytes: dict[str, int] = {}

    def bind(self, endpoint: str) -> None:
        """Listen. ``endpoint`` is then where peers find the socket. Raises ConfigError for plain tcp."""
        self._secure(endpoint, listens=True)
        self.socket.bind(endpoint)

    def connect(self, endpoint: str) -> None:
        """Talk to who listens there, now or later. Raises ConfigError for plain tcp."""
        self._secure(endpoint, listens=False)
        self.socket.connect(endpoint)

    @property
    def endpoint(self) -> str:
        """Of a socket that listens: its address, with the port that it was given."""
        return self.socket.get_string(zmq.LAST_ENDPOINT)

    def send(self, message: Message, to: str = "", *, always: bool = False) -> None:
        """Send, or keep for ``flush``. ``to`` names the peer on a router's channel.

        Raises PeerLost where the peer is gone, or so far behind that this message is not kept; ``always`` keeps
        it even then, for messages whose number something else bounds.
        """
        frames = codec.encode(message)
        peer = to or self._peer
        if peer in self._outboxes or not self._try_send(peer, frames):
            self._keep(peer, frames, always)

    def flush(self) -> bool:
        """Try again what a full socket refused; whether nothing is left. Raises PeerLost."""
        for peer, outbox in list(self._outboxes.items()):
            while outbox and self._try_send(peer, outbox[0]):
                self._outbox_bytes[peer] -= sum(map(len, outbox.popleft()))
            if not outbox:
                self.forget(peer)
        return not self._outboxes

    @property
    def has_unsent(self) -> bool:
        """Whether ``flush`` has anything to do."""
        return bool(self._outboxes)

    def forget(self, peer: str) -> None:
        """Drop what is kept for a peer."""
        self._outboxes.pop(peer, None)
        self._outbox_bytes.pop(peer, None)

    def forget_all(self) -> None:
        """Drop all that is kept."""
        self._outboxes.clear()
        self._outbox_bytes.clear()

    def receive(self) -> Iterator[tuple[str, Message]]:
        """Messages that have arrived, with their sender ('' but on a router's channel), up to one turn's share."""
        num_bytes = 0
        for _ in range(TURN_MESSAGES):
            try:
                parts = self._receive_parts()
            except zmq.Again:
                return
            frames = [part.bytes if len(part) < COPY_BELOW_BYTES else part for part in parts]
            try:
                sender = parts[0].bytes.decode("ascii") if self._routed else ""
                message = codec.decode(frames[1:] if self._routed else frames)
            except (WireError, UnicodeDecodeError):
                self.num_malformed += 1
                continue
            yield sender, message
            num_bytes += sum(map(len, frames))
            if num_bytes >= TURN_BYTES:
                return

    def close(self, linger_s: float = 0.0) -> None:
        """Close; ZMQ has so long to deliver what it was given, what is still kept here is dropped."""
        self.forget_all()
        self.socket.close(linger=int(linger_s * 1000))

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive_parts(self) -> list[zmq.Frame]:
        """One message. ``recv_multipart`` asks the socket whether more follows; the frame knows, at half the cost."""
        receive = self.socket.recv
        part = receive(zmq.NOBLOCK, copy=False)
        parts = [part]
        while part.more:
            part = receive(zmq.NOBLOCK, copy=False)
            parts.append(part)
        return parts

    def _secure(self, endpoint: str, *, listens: bool) -> None:
        if endpoint.startswith("ipc://"):
            return
        if not isinstance(self._context, CurveContext):
            self.close()
            raise ConfigError(f"{endpoint}: only ipc can do without keys")
        self._context.secure(self.socket, listens=listens)

    def _try_send(self, peer: str, frames: list[Buffer]) -> bool:
        send = self.socket.send
        try:
            # Not ``send_multipart``, which tries the type of every part first and takes twice as long.
            if self._routed:
                send(peer.encode("ascii"), _MORE, copy=False)
            for index in range(len(frames) - 1):
                send(frames[index], _MORE, copy=False)
            send(frames[-1], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            self.forget(peer)
            raise PeerLost(peer, str(error)) from error
        return True

    def _keep(self, peer: str, frames: list[Buffer], always: bool) -> None:
        kept = self._outbox_bytes.get(peer, 0) + sum(map(len, frames))
        if kept > OUTBOX_BYTES and not always:
            raise PeerLost(peer, f"more than {OUTBOX_BYTES} bytes behind")
        self._outboxes.setdefault(peer, deque()).append(frames)
        self._outbox_bytes[peer] = kept


def listen_router(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> Channel:
    """The side of many peers; sending to one that is not there raises PeerLost instead of dropping."""
    channel = Channel(context, zmq.ROUTER)
    channel.socket.router_mandatory = True
    channel.bind(endpoint)
    return channel


def dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, identity: str, peer: str) -> Channel:
    """One peer's side of ``listen_router``; ``identity`` is how the router knows it."""
    channel = Channel(context, zmq.DEALER, peer)
    channel.socket.routing_id = identity.encode("ascii")
    channel.connect(endpoint)
    return channel


def listen_pull(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> Channel:
    """An inbox that several peers push to."""
    channel = Channel(context, zmq.PULL)
    channel.bind(endpoint)
    return channel


def push(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, peer: str) -> Channel:
    """A one-way line to one inbox."""
    channel = Channel(context, zmq.PUSH, peer)
    channel.connect(endpoint)
    return channel


def shared(data: bytes) -> Buffer:
    """A frame in ZMQ's own memory: however often it is sent, it is copied this once, and no Python thread waits for
    its release."""
    return zmq.Frame(data, copy=True)


class LoopChannel:
    """A channel on an asyncio loop: hands each message to a callback, a bounded number per turn.

    The callback may return an iterator, the rest of its work in steps: a step ends the turn, so that other
    events come between, and the next message waits until all steps are done.

    ZMQ's file descriptor is edge-triggered: it says once that something may have changed, and every use of the
    socket can swallow that edge. So a turn ends with a look at what the socket is ready for, and turns follow
    each other until it is ready for nothing that is wanted.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        channel: Channel,
        on_message: Callable[[Message], Iterator[None] | None],
        on_caught_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self._channel = channel
        self._on_message = on_message
        self._on_caught_up = on_caught_up
        self._fd = int(channel.socket.fd)
        self._turn: asyncio.Handle | None = None
        self._work: Iterator[None] = iter(())  # of the last message
        self._in_work = False
        self._closed = False
        self._on_end: Callable[[], None] | None = None
        loop.add_reader(self._fd, self.wake)
        self.wake()

    def send(self, message: Message, *, always: bool = False) -> None:
        """See ``Channel.send``."""
        try:
            self._channel.send(message, always=always)
        finally:
            self.wake()

    def wake(self) -> None:
        """Take a turn soon. To be called after each use of the socket that did not go through here."""
        if self._turn is None and not self._closed:
            self._turn = self._loop.call_soon(self._take_turn)

    @property
    def is_behind(self) -> bool:
        """Whether messages wait for the peer: whoever can should pause until ``on_caught_up``."""
        return self._channel.has_unsent

    @property
    def num_malformed(self) -> int:
        """Messages dropped as malformed."""
        return self._channel.num_malformed

    def finish(self, on_end: Callable[[], None]) -> None:
        """The peer is dead: hand over what it had sent, in as many turns as that takes, close, and call ``on_end``."""
        self._channel.forget_all()
        self._on_end = on_end
        self._go_on()

    def close(self) -> None:
        """Stop reading and close the socket."""
        self._closed = True
        self._loop.remove_reader(self._fd)
        if self._turn is not None:
            self._turn.cancel()
        self._channel.close()

    def _take_turn(self) -> None:
        self._turn = None
        try:
            if self._channel.has_unsent and self._channel.flush():
                self._on_caught_up()
            if not self._step():
                for _, message in self._channel.receive():
                    self._work = self._on_message(message) or iter(())
                    if self._step() or self._closed:
                        break
        finally:  # whatever a callback raised: the next message must not wait for ever
            self._go_on()

    def _go_on(self) -> None:
        if self._closed:
            return
        if self._in_work or self._is_ready():
            self.wake()
        elif self._on_end is not None:
            self.close()
            self._on_end()

    def _step(self) -> bool:
        """Go on with the work on the last message; whether there is more of it."""
        self._in_work = False  # also if it raises
        self._in_work = next(self._work, DONE) is not DONE
        return self._in_work

    def _is_ready(self) -> bool:
        events = int(self._channel.socket.get(zmq.EVENTS))
        return bool(events & zmq.POLLIN or (events & zmq.POLLOUT and self._channel.has_unsent))
