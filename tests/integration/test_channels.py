"""Channels over real ZMQ sockets: nothing is lost, nothing blocks, nothing grows without bound."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from tests.helpers.wait import wait_for
from tokservice.wire import channels
from tokservice.wire.channels import Channel, LoopChannel, dealer, ipc_endpoint, listen_pull, listen_router, push
from tokservice.wire.errors import ConfigError, PeerLost
from tokservice.wire.messages import Abort, BodyChunk, Message, Prepare

TIMEOUT_S = 20.0


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


def _abort(number: int) -> Abort:
    return Abort(str(number))


def _piece(number: int) -> BodyChunk:
    """Too large for thousands of them to fit into the kernel's buffers, beside ZMQ's own."""
    return BodyChunk(str(number), False, (bytes(4096),))


def _numbers(messages: list[Message]) -> list[int]:
    return [int(message.request_id) for message in messages if isinstance(message, (Abort, BodyChunk))]


def _receive(channel: Channel, count: int) -> list[tuple[str, Message]]:
    got: list[tuple[str, Message]] = []

    def all_are_there() -> bool:
        got.extend(channel.receive())
        return len(got) >= count

    wait_for(all_are_there, TIMEOUT_S, f"{count} messages")
    return got


def _connected(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> tuple[Channel, Channel]:
    """A router and a dealer that it knows."""
    router = listen_router(context, endpoint)
    peer = dealer(context, endpoint, "engine.0.1", "router.0.1")
    peer.send(_abort(0))
    assert _receive(router, 1) == [("engine.0.1", _abort(0))]
    return router, peer


# --- plain channels


def test_a_router_knows_its_peers_by_their_identity(context: zmq.Context[Any], endpoint: str) -> None:
    router, peer = _connected(context, endpoint)
    with router, peer:
        router.send(_abort(1), "engine.0.1")
        assert _receive(peer, 1) == [("", _abort(1))]


def test_a_message_to_nobody_is_an_error(context: zmq.Context[Any], endpoint: str) -> None:
    """ROUTER sockets drop such messages without a sign, and a client waits for ever, unless told otherwise."""
    with listen_router(context, endpoint) as router, pytest.raises(PeerLost) as lost:
        router.send(_abort(1), "engine.0.1")
    assert lost.value.identity == "engine.0.1"


def test_a_message_to_the_dead_is_an_error(context: zmq.Context[Any], endpoint: str) -> None:
    router, peer = _connected(context, endpoint)
    with router:
        peer.close()

        def is_lost() -> bool:
            try:
                router.send(_abort(1), "engine.0.1")
            except PeerLost:
                return True
            return False

        wait_for(is_lost, TIMEOUT_S)
        assert not router.has_unsent


def test_a_stalled_receiver_loses_nothing(context: zmq.Context[Any], endpoint: str) -> None:
    """Past the high-water mark send used to drop or block (verifiers#951); what is kept here arrives, in order,
    once it reads."""
    router, peer = _connected(context, endpoint)
    total = 3 * channels.HIGH_WATER_MARK
    with router, peer:
        for number in range(total):
            router.send(_piece(number), "engine.0.1")
        assert router.has_unsent
        got: list[tuple[str, Message]] = []

        def all_are_there() -> bool:
            router.flush()
            got.extend(peer.receive())
            return len(got) >= total

        wait_for(all_are_there, TIMEOUT_S)
        assert _numbers([message for _, message in got]) == list(range(total))
        assert not router.has_unsent


def test_one_stalled_peer_does_not_hold_up_another(context: zmq.Context[Any], endpoint: str) -> None:
    router, stalled = _connected(context, endpoint)
    other = dealer(context, endpoint, "engine.1.1", "router.0.1")
    with router, stalled, other:
        other.send(_abort(0))
        _receive(router, 1)
        for number in range(3 * channels.HIGH_WATER_MARK):
            router.send(_piece(number), "engine.0.1")
        router.send(_abort(7), "engine.1.1")
        assert _receive(other, 1) == [("", _abort(7))]


def test_a_pipe_of_its_own_is_full_while_its_inbox_is_shared(context: zmq.Context[Any], endpoint: str) -> None:
    with listen_pull(context, endpoint) as inbox:
        lines = [push(context, endpoint, "engine.0.1") for _ in range(2)]
        total = 2 * channels.HIGH_WATER_MARK
        for number in range(total):
            for line in lines:
                line.send(_abort(number))
        got: list[Message] = []

        def all_are_there() -> bool:
            for line in lines:
                line.flush()
            got.extend(message for _, message in inbox.receive())
            return len(got) == 2 * total

        wait_for(all_are_there, TIMEOUT_S)
        assert sorted(_numbers(got)) == sorted([*range(total), *range(total)])
        for line in lines:
            line.close()


BIG = BodyChunk("1", False, (bytes(60_000),))


def _fill(line: Channel) -> int:
    """Send numbered messages until one is refused; its number."""
    for number in range(100_000):
        try:
            line.send(BodyChunk(str(number), False, BIG.frames))
        except PeerLost:
            return number
    raise AssertionError("never refused")


@pytest.fixture
def small_outbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "OUTBOX_BYTES", 1_000_000)


@pytest.mark.usefixtures("small_outbox")
def test_a_full_outbox_refuses_and_keeps_what_it_has(context: zmq.Context[Any], endpoint: str) -> None:
    """It used to drop all that it held: requests vanished, and streams went on with a gap in their text."""
    with push(context, endpoint, "engine.0.1") as line:  # nobody listens yet
        taken = _fill(line)
        assert taken > channels.HIGH_WATER_MARK
        with listen_pull(context, endpoint) as inbox:
            got: list[Message] = []

            def all_are_there() -> bool:
                line.flush()
                got.extend(message for _, message in inbox.receive())
                return len(got) >= taken

            wait_for(all_are_there, TIMEOUT_S)
            assert _numbers(got) == list(range(taken))
            line.send(_abort(taken))
            assert _numbers([message for _, message in _receive(inbox, 1)]) == [taken]


@pytest.mark.usefixtures("small_outbox")
def test_what_must_be_kept_is_kept_beyond_the_cap(context: zmq.Context[Any], endpoint: str) -> None:
    with push(context, endpoint, "engine.0.1") as line:
        _fill(line)
        line.send(_abort(5), always=True)
        with pytest.raises(PeerLost):
            line.send(BIG)
        with listen_pull(context, endpoint) as inbox:
            last: list[Message] = []

            def has_arrived() -> bool:
                line.flush()
                last.extend(message for _, message in inbox.receive())
                return bool(last) and last[-1] == _abort(5)

            wait_for(has_arrived, TIMEOUT_S)


def test_reading_is_bounded_by_messages_and_by_bytes(context: zmq.Context[Any], endpoint: str) -> None:
    """One turn that handles all that has arrived starves everything else on the loop."""
    with listen_pull(context, endpoint) as inbox, push(context, endpoint, "engine.0.1") as line:
        for number in range(500):
            line.send(_abort(number))
        wait_for(lambda: inbox.socket.poll(0), TIMEOUT_S)
        sizes: list[int] = []
        while sum(sizes) < 500:
            sizes.append(len(list(inbox.receive())))
        assert max(sizes) <= channels.TURN_MESSAGES
        piece = bytes(channels.TURN_BYTES // 4 + 1)
        for number in range(8):
            line.send(Prepare(str(number), 1, 1, "e", "d", (piece, piece)))
        sizes = []
        while sum(sizes) < 8:
            sizes.append(len(list(inbox.receive())))
        assert max(sizes) <= 2


def test_malformed_messages_are_counted_and_harm_nobody(context: zmq.Context[Any], endpoint: str) -> None:
    router, peer = _connected(context, endpoint)
    with router, peer:
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        stranger.routing_id = b"\xff\xfe"  # no identity of ours
        stranger.connect(endpoint)
        bad = [[b""], [b"\x80\x04K\x01."], [b"\x01\x63"], [b"x"] * 300, [b"\x01\x03" + b"\xdd\xff\xff\xff\xff"]]
        for frames in bad:
            stranger.send_multipart(frames)
            peer.socket.send_multipart(frames)
        peer.send(_abort(1))
        assert _receive(router, 1) == [("engine.0.1", _abort(1))]
        wait_for(lambda: list(router.receive()) == [] and router.num_malformed == 2 * len(bad), TIMEOUT_S)
        stranger.close()


def test_large_frames_are_handed_over_without_a_copy(context: zmq.Context[Any], endpoint: str) -> None:
    body = bytes(5_000_000)
    with listen_pull(context, endpoint) as inbox, push(context, endpoint, "engine.0.1") as line:
        line.send(Prepare("r", 1, 1, "e", "d", (body, b"small")))
        ((_, message),) = _receive(inbox, 1)
        assert isinstance(message, Prepare)
        assert isinstance(message.frames[0], zmq.Frame)
        assert bytes(message.frames[0]) == body
        assert message.frames[1] == b"small"
        assert isinstance(message.frames[1], bytes)


def test_closing_with_messages_for_a_dead_peer_does_not_hang(context: zmq.Context[Any], endpoint: str) -> None:
    """Ending a context waits for unsent messages unless every socket's linger is 0: pyzmq#102."""
    own: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    line = push(own, endpoint, "engine.0.1")
    for _ in range(100):
        line.send(BIG)
    start = time.monotonic()
    line.close()
    own.term()
    assert time.monotonic() - start < 2.0


def test_last_words_arrive_when_there_is_time_for_them(context: zmq.Context[Any], endpoint: str) -> None:
    """A router that leaves tells its clients why; closed with linger 0 it took these messages along."""
    own: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = listen_router(own, endpoint)
    with dealer(context, endpoint, "api.0.1", "router.0.1") as peer:
        peer.send(_abort(0))
        _receive(router, 1)
        for number in range(500):
            router.send(BodyChunk(str(number), False, BIG.frames), "api.0.1")
        router.close(linger_s=TIMEOUT_S)
        got = _receive(peer, 500)
        assert _numbers([message for _, message in got]) == list(range(500))
    own.term()


def test_a_socket_path_that_is_too_long_is_named() -> None:
    folder = Path("/tmp") / ("x" * 100)
    with pytest.raises(ConfigError, match=f"{folder}/supervisor is longer than the 107 bytes"):
        ipc_endpoint(folder, "supervisor")
    assert ipc_endpoint(Path("/" + "x" * 100), "r" * 5) == f"ipc:///{'x' * 100}/rrrrr"


# --- on an event loop

LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Coroutine[Any, Any, None]], None]]:
    with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
        yield lambda body: runner.run(asyncio.wait_for(body, TIMEOUT_S))


async def _until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_every_message_arrives_and_in_order(run: Any, context: zmq.Context[Any], endpoint: str) -> None:
    """The descriptor is edge-triggered: whoever stops reading early never hears of the rest."""
    total = 5000

    async def body() -> None:
        router, peer = _connected(context, endpoint)
        got: list[Message] = []
        line = LoopChannel(asyncio.get_running_loop(), peer, got.append)
        with router:
            for number in range(total):
                router.send(_abort(number), "engine.0.1")
            while len(got) < total:
                router.flush()
                await asyncio.sleep(0)
        assert _numbers(got) == list(range(total))
        line.close()

    run(body())


def test_the_loop_turns_while_thousands_of_messages_are_read(
    run: Any, context: zmq.Context[Any], endpoint: str
) -> None:
    async def body() -> None:
        router, peer = _connected(context, endpoint)
        loop = asyncio.get_running_loop()
        with router:
            for number in range(channels.HIGH_WATER_MARK):
                router.send(_abort(number), "engine.0.1")
            await asyncio.sleep(0.1)  # so that all of them wait in the socket
            got: list[Message] = []
            seen: list[int] = []

            def turn() -> None:
                seen.append(len(got))
                if len(got) < channels.HIGH_WATER_MARK:
                    loop.call_soon(turn)

            line = LoopChannel(loop, peer, got.append)
            loop.call_soon(turn)
            await _until(lambda: len(got) == channels.HIGH_WATER_MARK)
            steps = [later - earlier for earlier, later in itertools.pairwise(seen)]
            assert max(steps) <= channels.TURN_MESSAGES
            line.close()

    run(body())


def test_a_turn_of_nothing_but_malformed_messages_is_not_the_last(
    run: Any, context: zmq.Context[Any], endpoint: str
) -> None:
    """A turn that handed over no message ended the reading, though good messages waited behind the bad ones."""

    async def body() -> None:
        router, peer = _connected(context, endpoint)
        for _ in range(3 * channels.TURN_MESSAGES):
            router.socket.send_multipart([b"engine.0.1", b"nonsense"])
        router.send(_abort(1), "engine.0.1")
        await asyncio.sleep(0.1)  # all of it arrives before the reader looks: there is one edge only
        got: list[Message] = []
        line = LoopChannel(asyncio.get_running_loop(), peer, got.append)
        await _until(lambda: got)
        assert line.num_malformed == 3 * channels.TURN_MESSAGES
        line.close()
        router.close()

    run(body())


def test_a_callback_that_raises_does_not_end_the_reading(run: Any, context: zmq.Context[Any], endpoint: str) -> None:
    async def body() -> None:
        router, peer = _connected(context, endpoint)
        loop = asyncio.get_running_loop()
        errors: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: errors.append(context))
        for number in range(10):
            router.send(_abort(number), "engine.0.1")
        await asyncio.sleep(0.05)
        got: list[Message] = []

        def on_message(message: Message) -> None:
            got.append(message)
            if message == _abort(3):
                raise RuntimeError("a fault in one request")

        line = LoopChannel(loop, peer, on_message)
        await _until(lambda: len(got) == 10)
        assert _numbers(got) == list(range(10))
        assert len(errors) == 1
        line.close()
        router.close()

    run(body())


def test_sending_around_the_loop_channel_needs_a_wake(run: Any, context: zmq.Context[Any], endpoint: str) -> None:
    """A send can swallow the edge of a message that has just arrived; without a look afterwards no message is
    ever heard of again (heartbeats are sent straight through the channel)."""

    async def body() -> None:
        router, peer = _connected(context, endpoint)
        got: list[Message] = []
        line = LoopChannel(asyncio.get_running_loop(), peer, got.append)
        await asyncio.sleep(0.05)
        for number in range(200):
            router.send(_abort(number), "engine.0.1")
            time.sleep(0.005)  # the message arrives while this turn of the loop still runs
            peer.send(_abort(number))
            line.wake()
            await _until(lambda number=number: len(got) == number + 1)  # type: ignore[misc]
        line.close()
        router.close()

    run(body())


def test_what_waits_is_sent_once_the_peer_reads_and_the_owner_hears_of_it(
    run: Any, context: zmq.Context[Any], endpoint: str
) -> None:
    async def body() -> None:
        router, peer = _connected(context, endpoint)
        caught_up: list[bool] = []
        line = LoopChannel(asyncio.get_running_loop(), peer, lambda _: None, lambda: caught_up.append(True))
        total = 3 * channels.HIGH_WATER_MARK
        for number in range(total):
            line.send(_piece(number))
        await asyncio.sleep(0.05)
        assert line.is_behind
        assert not caught_up
        got: list[Message] = []
        while len(got) < total:
            got.extend(message for _, message in router.receive())
            await asyncio.sleep(0)
        await _until(lambda: caught_up)
        assert not line.is_behind
        assert _numbers(got) == list(range(total))
        line.close()
        router.close()

    run(body())


def test_traffic_both_ways_past_the_high_water_mark(run: Any, context: zmq.Context[Any], endpoint: str) -> None:
    """Each answer is sent from within the callback, while the other side sends on: edges are swallowed all the time."""
    total = 4 * channels.HIGH_WATER_MARK

    async def body() -> None:
        router, peer = _connected(context, endpoint)
        line = LoopChannel(asyncio.get_running_loop(), peer, lambda message: line.send(message))
        answers: list[Message] = []
        sent = 0
        while len(answers) < total:
            for _ in range(min(97, total - sent)):
                router.send(_piece(sent), "engine.0.1")
                sent += 1
            router.flush()
            if sent > 2 * channels.HIGH_WATER_MARK:  # until then the answers pile up
                answers += [message for _, message in router.receive()]
            await asyncio.sleep(0)
        assert _numbers(answers) == list(range(total))
        line.close()
        router.close()

    run(body())


def test_closing_from_a_callback_ends_the_reading(run: Any, context: zmq.Context[Any], endpoint: str) -> None:
    async def body() -> None:
        router, peer = _connected(context, endpoint)
        for number in range(10):
            router.send(_abort(number), "engine.0.1")
        await asyncio.sleep(0.05)
        got: list[Message] = []

        def on_message(message: Message) -> None:
            got.append(message)
            line.close()

        line = LoopChannel(asyncio.get_running_loop(), peer, on_message)
        await asyncio.sleep(0.05)
        assert _numbers(got) == [0]
        line.wake()
        await asyncio.sleep(0)
        router.close()

    run(body())
