"""Connections follow the topology: to the one router, and to every process of a role."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.helpers.wait import wait_for
from tokservice.runtime.links import PeerLinks, RouterLink
from tokservice.wire import channels
from tokservice.wire.channels import Channel, ipc_endpoint, listen_pull, listen_router
from tokservice.wire.errors import PeerLost
from tokservice.wire.messages import (
    WIRE_VERSION,
    Abort,
    Answered,
    EngineLimits,
    Hello,
    Message,
    Peer,
    Prepare,
    Role,
    Topology,
)


class FakeProcess:
    """What a link needs of its process."""

    identity = "detokenizer.0.1"

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.context = context
        self.channels: dict[Channel, Callable[[str, Message], None] | None] = {}

    def add(self, channel: Channel, on_message: Callable[[str, Message], None] | None = None) -> None:
        self.channels[channel] = on_message

    def remove(self, channel: Channel) -> None:
        del self.channels[channel]
        channel.close()

    def read(self) -> None:
        for channel, on_message in list(self.channels.items()):
            if on_message is not None:
                for sender, message in channel.receive():
                    on_message(sender, message)


@pytest.fixture
def process() -> Iterator[FakeProcess]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield FakeProcess(context)
    context.destroy(linger=0)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ts", dir="/tmp") as folder:
        yield Path(folder)


HELLO = Hello(FakeProcess.identity, Role.DETOKENIZER, WIRE_VERSION, 1)


def _router(folder: Path, incarnation: int) -> Peer:
    name = f"router.0.{incarnation}"
    endpoints = (ipc_endpoint(folder, f"{name}.api"), ipc_endpoint(folder, f"{name}.work"))
    return Peer(name, Role.ROUTER, endpoints, EngineLimits())


def _engine(folder: Path, slot: int, incarnation: int) -> Peer:
    name = f"engine.{slot}.{incarnation}"
    return Peer(name, Role.ENGINE, (ipc_endpoint(folder, name),), EngineLimits())


def _link(process: Any, got: list[Message], lost: list[str]) -> RouterLink:
    return RouterLink(process, lambda: HELLO, got.append, lambda: lost.append("all work"))


def _next(channel: Channel) -> tuple[str, Message]:
    got: list[tuple[str, Message]] = []
    wait_for(lambda: got.extend(channel.receive()) or got)
    assert len(got) == 1
    return got[0]


def test_it_greets_the_router_and_hears_it(process: FakeProcess, folder: Path) -> None:
    got: list[Message] = []
    lost: list[str] = []
    peer = _router(folder, 1)
    link = _link(process, got, lost)
    link.send(Abort("moot"))  # there is no router yet
    with listen_router(process.context, peer.endpoints[1]) as router:
        link.follow(Topology(1, (peer,)))
        link.follow(Topology(2, (peer, _engine(folder, 0, 1))))
        assert _next(router) == (FakeProcess.identity, HELLO)
        link.send(Abort("r"))
        assert _next(router) == (FakeProcess.identity, Abort("r"))
        router.send(Abort("s"), FakeProcess.identity)
        wait_for(lambda: process.read() or got)
    assert got == [Abort("s")]
    assert lost == []


def test_a_new_router_knows_nothing_and_is_greeted_again(process: FakeProcess, folder: Path) -> None:
    lost: list[str] = []
    first, second = _router(folder, 1), _router(folder, 2)
    link = _link(process, [], lost)
    link.follow(Topology(1, (first,)))
    link.follow(Topology(2, ()))
    assert lost == ["all work"]
    link.send(Abort("moot"))
    assert not process.channels
    with listen_router(process.context, second.endpoints[1]) as router:
        link.follow(Topology(3, (second,)))
        assert _next(router) == (FakeProcess.identity, HELLO)
    assert lost == ["all work"]


def test_a_router_that_is_replaced_in_one_step(process: FakeProcess, folder: Path) -> None:
    lost: list[str] = []
    link = _link(process, [], lost)
    link.follow(Topology(1, (_router(folder, 1),)))
    link.follow(Topology(2, (_router(folder, 2),)))
    assert lost == ["all work"]
    assert len(process.channels) == 1


def test_a_word_that_the_router_cannot_take_ends_the_worker(
    process: FakeProcess, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was dropped with a log line, and the stream went on with a gap in its text."""
    monkeypatch.setattr(channels, "OUTBOX_BYTES", 1_000_000)
    link = _link(process, [], [])
    link.follow(Topology(1, (_router(folder, 1),)))  # which never listens

    def is_refused() -> bool:
        try:
            link.send(Answered("r", 1, (bytes(60_000),)))
        except PeerLost:
            return True
        return False

    assert any(is_refused() for _ in range(3000))


def test_lines_to_every_process_of_a_role(process: FakeProcess, folder: Path) -> None:
    links = PeerLinks(process, Role.ENGINE)  # type: ignore[arg-type]
    engines = [_engine(folder, 0, 1), _engine(folder, 1, 1)]
    inboxes = [listen_pull(process.context, engine.endpoints[0]) for engine in engines]
    links.follow(Topology(1, (_router(folder, 1), *engines)))
    for slot, inbox in enumerate(inboxes):
        links.send(f"engine.{slot}.1", Prepare(str(slot), 1, 1, "e", "d"))
        assert _next(inbox) == ("", Prepare(str(slot), 1, 1, "e", "d"))
        inbox.close()


def test_the_line_to_the_dead_is_closed_with_all_that_is_unsent(process: FakeProcess, folder: Path) -> None:
    """A socket that stays connected would hand it to the next process at that address."""
    links = PeerLinks(process, Role.ENGINE)  # type: ignore[arg-type]
    old, new = _engine(folder, 0, 1), _engine(folder, 0, 2)
    links.follow(Topology(1, (old,)))
    links.send("engine.0.1", Abort("r"))
    (channel,) = process.channels
    links.follow(Topology(2, (new,)))
    assert channel.socket.closed
    assert len(process.channels) == 1
    with pytest.raises(PeerLost, match=r"engine\.0\.1: not in the topology"):
        links.send("engine.0.1", Abort("r"))
    with listen_pull(process.context, new.endpoints[0]) as inbox:
        links.send("engine.0.2", Abort("s"))
        assert _next(inbox) == ("", Abort("s"))
