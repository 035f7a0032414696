"""A tokenizer worker between a router's socket and an engine's: what it does with bodies whose client has gone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import tiny_tokenizers
from tests.helpers.own_cache import own_cache
from tests.helpers.wait import wait_for
from tokservice.runtime.config import from_dict, save
from tokservice.runtime.process import CONFIG_FILE, Process, ProcessName
from tokservice.tokenizer.tokenizer_proc import Tokenizer
from tokservice.wire.channels import Channel, listen_pull, listen_router
from tokservice.wire.messages import (
    Abort,
    Accepted,
    EngineLimits,
    Generate,
    Hello,
    Message,
    Peer,
    Prepare,
    Rejected,
    Role,
    Route,
    Topology,
)

__all__ = ["own_cache"]

ROUTER, ENGINE = "router.0.1", "engine.0.1"
BODY = b'{"prompt": "hello"}'


class World:
    """The worker, and the sockets that it talks to. Nothing happens but what the test makes happen."""

    def __init__(self, folder: Path) -> None:
        tiny_tokenizers.write_model(folder / "model", tiny_tokenizers.byte_level())
        save(from_dict({"model": {"path": str(folder / "model"), "served_name": "m"}}), folder / CONFIG_FILE)
        self.process = Process(ProcessName(Role.TOKENIZER, 0, 1), folder)
        self.work = listen_router(self.process.context, f"ipc://{folder}/work")
        self.engine = listen_pull(self.process.context, f"ipc://{folder}/engine")
        self.worker = Tokenizer(self.process)
        router = Peer(ROUTER, Role.ROUTER, (f"ipc://{folder}/api", f"ipc://{folder}/work"), EngineLimits())
        engine = Peer(ENGINE, Role.ENGINE, (f"ipc://{folder}/engine",), EngineLimits(1000, 1000, 1000, (), 4))
        self.worker.on_topology(Topology(1, (router, engine), ()))
        assert isinstance(self.receive(self.work), Hello)

    def send(self, *messages: Message) -> None:
        """From the router; the worker has read them all, and begun none."""
        for message in messages:
            self.work.send(message, self.process.identity)
        inbox = self.worker._router._channel
        assert inbox is not None
        for _ in messages:
            self.worker._on_message(self.receive(inbox))

    def receive(self, channel: Channel) -> Message:
        """The next message to the router or the engine."""
        found: list[Message] = []

        def arrived() -> bool:
            for _, message in channel.receive():
                found.append(message)
                return True
            return False

        wait_for(arrived, what="a message")
        return found[0]

    def close(self) -> None:
        self.work.close()
        self.engine.close()
        self.process.close()


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="ts", dir="/tmp") as folder:
        it = World(Path(folder))
        yield it
        it.close()


def prepare(name: str) -> Prepare:
    return Prepare(name, 1, Route.COMPLETIONS, ENGINE, "detokenizer.0.1", (BODY,))


def test_a_body_whose_client_has_gone_is_dropped_before_it_is_encoded(world: World) -> None:
    """A queue of prompts that nobody waits for any more kept the tokenizer busy before it got to living ones."""
    world.send(prepare("a"), prepare("b"), Abort("a", 1))
    gone = world.receive(world.work)
    assert isinstance(gone, Rejected)
    assert (gone.request_id, gone.attempt, gone.status) == ("a", 1, 499), "the router gets its place back"
    world.worker.turn(0.0)
    accepted, generate = world.receive(world.work), world.receive(world.engine)
    assert isinstance(accepted, Accepted)
    assert isinstance(generate, Generate)
    assert accepted.request_id == generate.request_id == "b"
    assert world.worker.report(world.process.metrics) == (1, 0), "one body was prepared, none waits"


def test_an_abort_of_another_attempt_or_of_a_prepared_body_changes_nothing(world: World) -> None:
    world.send(prepare("a"), Abort("a", 2), Abort("unknown", 1))
    world.worker.turn(0.0)
    assert isinstance(world.receive(world.work), Accepted)
    world.send(Abort("a", 1))
    assert world.worker.report(world.process.metrics) == (1, 0)
