"""Channels over real ZMQ sockets: nothing is lost, nothing blocks, nothing grows without bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.helpers.numbered_messages import TIMEOUT_S, abort, connected, large_piece, numbers, receive
from tests.helpers.wait import wait_for
from tokservice.wire import channels
from tokservice.wire.channels import Channel, dealer, ipc_endpoint, listen_pull, listen_router, push
from tokservice.wire.errors import ConfigError, PeerLost
from tokservice.wire.messages import BodyChunk, Message, Prepare

BIG = BodyChunk("1", False, (bytes(60_000),))


def test_a_router_knows_its_peers_by_their_identity(context: zmq.Context[Any], endpoint: str) -> None:
    router, peer = connected(context, endpoint)
    with router, peer:
        router.send(abort(1), "engine.0.1")
        assert receive(peer, 1) == [("", abort(1))]


def test_a_message_to_nobody_is_an_error(context: zmq.Context[Any], endpoint: str) -> None:
    """ROUTER sockets drop such messages without a sign, and a client waits for ever, unless told otherwise."""
    with listen_router(context, endpoint) as router, pytest.raises(PeerLost) as lost:
        router.send(abort(1), "engine.0.1")
    assert lost.value.identity == "engine.0.1"


def test_a_message_to_the_dead_is_an_error(context: zmq.Context[Any], endpoint: str) -> None:
    router, peer = connected(context, endpoint)
    with router:
        peer.close()

        def is_lost() -> bool:
            try:
                router.send(abort(1), "engine.0.1")
            except PeerLost:
                return True
            return False

        wait_for(is_lost, TIMEOUT_S)
        assert not router.has_unsent


def test_a_stalled_receiver_loses_nothing(context: zmq.Context[Any], endpoint: str) -> None:
    """Past the high-water mark send used to drop or block (verifiers#951); what is kept here arrives, in order,
    once it reads."""
    router, peer = connected(context, endpoint)
    total = 3 * channels.HIGH_WATER_MARK
    with router, peer:
        for number in range(total):
            router.send(large_piece(number), "engine.0.1")
        assert router.has_unsent
        got: list[tuple[str, Message]] = []

        def all_are_there() -> bool:
            router.flush()
            got.extend(peer.receive())
            return len(got) >= total

        wait_for(all_are_there, TIMEOUT_S)
        assert numbers([message for _, message in got]) == list(range(total))
        assert not router.has_unsent


def test_one_stalled_peer_does_not_hold_up_another(context: zmq.Context[Any], endpoint: str) -> None:
    router, stalled = connected(context, endpoint)
    other = dealer(context, endpoint, "engine.1.1", "router.0.1")
    with router, stalled, other:
        other.send(abort(0))
        receive(router, 1)
        for number in range(3 * channels.HIGH_WATER_MARK):
            router.send(large_piece(number), "engine.0.1")
        router.send(abort(7), "engine.1.1")
        assert receive(other, 1) == [("", abort(7))]


def test_a_pipe_of_its_own_is_full_while_its_inbox_is_shared(context: zmq.Context[Any], endpoint: str) -> None:
    with listen_pull(context, endpoint) as inbox:
        lines = [push(context, endpoint, "engine.0.1") for _ in range(2)]
        total = 2 * channels.HIGH_WATER_MARK
        for number in range(total):
            for line in lines:
                line.send(abort(number))
        got: list[Message] = []

        def all_are_there() -> bool:
            for line in lines:
                line.flush()
            got.extend(message for _, message in inbox.receive())
            return len(got) == 2 * total

        wait_for(all_are_there, TIMEOUT_S)
        assert sorted(numbers(got)) == sorted([*range(total), *range(total)])
        for line in lines:
            line.close()


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
            assert numbers(got) == list(range(taken))
            line.send(abort(taken))
            assert numbers([message for _, message in receive(inbox, 1)]) == [taken]


@pytest.mark.usefixtures("small_outbox")
def test_what_must_be_kept_is_kept_beyond_the_cap(context: zmq.Context[Any], endpoint: str) -> None:
    with push(context, endpoint, "engine.0.1") as line:
        _fill(line)
        line.send(abort(5), always=True)
        with pytest.raises(PeerLost):
            line.send(BIG)
        with listen_pull(context, endpoint) as inbox:
            last: list[Message] = []

            def has_arrived() -> bool:
                line.flush()
                last.extend(message for _, message in inbox.receive())
                return bool(last) and last[-1] == abort(5)

            wait_for(has_arrived, TIMEOUT_S)


def test_reading_is_bounded_by_messages_and_by_bytes(context: zmq.Context[Any], endpoint: str) -> None:
    """One turn that handles all that has arrived starves everything else on the loop."""
    with listen_pull(context, endpoint) as inbox, push(context, endpoint, "engine.0.1") as line:
        for number in range(500):
            line.send(abort(number))
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
    router, peer = connected(context, endpoint)
    with router, peer:
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        stranger.routing_id = b"\xff\xfe"  # no identity of ours
        stranger.connect(endpoint)
        bad = [[b""], [b"\x80\x04K\x01."], [b"\x01\x63"], [b"x"] * 300, [b"\x01\x03" + b"\xdd\xff\xff\xff\xff"]]
        for frames in bad:
            stranger.send_multipart(frames)
            peer.socket.send_multipart(frames)
        peer.send(abort(1))
        assert receive(router, 1) == [("engine.0.1", abort(1))]
        wait_for(lambda: list(router.receive()) == [] and router.num_malformed == 2 * len(bad), TIMEOUT_S)
        stranger.close()


def test_large_frames_are_handed_over_without_a_copy(context: zmq.Context[Any], endpoint: str) -> None:
    body = bytes(5_000_000)
    with listen_pull(context, endpoint) as inbox, push(context, endpoint, "engine.0.1") as line:
        line.send(Prepare("r", 1, 1, "e", "d", (body, b"small")))
        ((_, message),) = receive(inbox, 1)
        assert isinstance(message, Prepare)
        assert isinstance(message.frames[0], zmq.Frame)
        assert message.frames[0].bytes == body
        assert message.frames[1] == b"small"
        assert isinstance(message.frames[1], bytes)


def test_closing_with_messages_for_a_dead_peer_does_not_hang(context: zmq.Context[Any], endpoint: str) -> None:
    """Ending a context waits for unsent messages unless every socket's linger is 0: pyzmq#102."""
    own: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    line = push(own, endpoint, "engine.0.1")
    for _ in range(100):
        line.send(BIG)
    line.close()
    own.term()  # would never return


def test_last_words_arrive_when_there_is_time_for_them(context: zmq.Context[Any], endpoint: str) -> None:
    """A router that leaves tells its clients why; closed with linger 0 it took these messages along."""
    own: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = listen_router(own, endpoint)
    with dealer(context, endpoint, "api.0.1", "router.0.1") as peer:
        peer.send(abort(0))
        receive(router, 1)
        for number in range(500):
            router.send(BodyChunk(str(number), False, BIG.frames), "api.0.1")
        router.close(linger_s=TIMEOUT_S)
        got = receive(peer, 500)
        assert numbers([message for _, message in got]) == list(range(500))
    own.term()


def test_a_socket_path_that_is_too_long_is_named() -> None:
    folder = Path("/tmp") / ("x" * 100)
    with pytest.raises(ConfigError, match=f"{folder}/supervisor is longer than the 107 bytes"):
        ipc_endpoint(folder, "supervisor")
    assert ipc_endpoint(Path("/" + "x" * 100), "r" * 5) == f"ipc:///{'x' * 100}/rrrrr"
