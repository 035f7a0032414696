"""Channels on an event loop: every message is heard of, and the loop turns meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop
import zmq

from tests.helpers.numbered_messages import TIMEOUT_S, abort, connected, large_piece, numbers
from tokservice.wire import channels
from tokservice.wire.channels import LoopChannel
from tokservice.wire.messages import Message

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
        router, peer = connected(context, endpoint)
        got: list[Message] = []
        line = LoopChannel(asyncio.get_running_loop(), peer, got.append)
        with router:
            for number in range(total):
                router.send(abort(number), "engine.0.1")
            while len(got) < total:
                router.flush()
                await asyncio.sleep(0)
        assert numbers(got) == list(range(total))
        line.close()

    run(body())


def test_the_loop_turns_while_thousands_of_messages_are_read(
    run: Any, context: zmq.Context[Any], endpoint: str
) -> None:
    async def body() -> None:
        router, peer = connected(context, endpoint)
        loop = asyncio.get_running_loop()
        with router:
            for number in range(channels.HIGH_WATER_MARK):
                router.send(abort(number), "engine.0.1")
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
        router, peer = connected(context, endpoint)
        for _ in range(3 * channels.TURN_MESSAGES):
            router.socket.send_multipart([b"engine.0.1", b"nonsense"])
        router.send(abort(1), "engine.0.1")
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
        router, peer = connected(context, endpoint)
        loop = asyncio.get_running_loop()
        errors: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: errors.append(context))
        for number in range(10):
            router.send(abort(number), "engine.0.1")
        await asyncio.sleep(0.05)
        got: list[Message] = []

        def on_message(message: Message) -> None:
            got.append(message)
            if message == abort(3):
                raise RuntimeError("a fault in one request")

        line = LoopChannel(loop, peer, on_message)
        await _until(lambda: len(got) == 10)
        assert numbers(got) == list(range(10))
        assert len(errors) == 1
        line.close()
        router.close()

    run(body())


def test_sending_around_the_loop_channel_needs_a_wake(run: Any, context: zmq.Context[Any], endpoint: str) -> None:
    """A send can swallow the edge of a message that has just arrived; without a look afterwards no message is
    ever heard of again (heartbeats are sent straight through the channel)."""

    async def body() -> None:
        router, peer = connected(context, endpoint)
        got: list[Message] = []
        line = LoopChannel(asyncio.get_running_loop(), peer, got.append)
        await asyncio.sleep(0.05)
        for number in range(60):
            router.send(abort(number), "engine.0.1")
            time.sleep(0.005)  # the message arrives while this turn of the loop still runs
            peer.send(abort(number))
            line.wake()
            await _until(lambda number=number: len(got) == number + 1)  # type: ignore[misc]
        line.close()
        router.close()

    run(body())


def test_what_waits_is_sent_once_the_peer_reads_and_the_owner_hears_of_it(
    run: Any, context: zmq.Context[Any], endpoint: str
) -> None:
    async def body() -> None:
        router, peer = connected(context, endpoint)
        caught_up: list[bool] = []
        line = LoopChannel(asyncio.get_running_loop(), peer, lambda _: None, lambda: caught_up.append(True))
        total = 3 * channels.HIGH_WATER_MARK
        for number in range(total):
            line.send(large_piece(number))
        await asyncio.sleep(0.05)
        assert line.is_behind
        assert not caught_up
        got: list[Message] = []
        while len(got) < total:
            got.extend(message for _, message in router.receive())
            await asyncio.sleep(0)
        await _until(lambda: caught_up)
        assert not line.is_behind
        assert numbers(got) == list(range(total))
        line.close()
        router.close()

    run(body())


def test_traffic_both_ways_past_the_high_water_mark(run: Any, context: zmq.Context[Any], endpoint: str) -> None:
    """Each answer is sent from within the callback, while the other side sends on: edges are swallowed all the time."""
    total = 4 * channels.HIGH_WATER_MARK

    async def body() -> None:
        router, peer = connected(context, endpoint)
        line = LoopChannel(asyncio.get_running_loop(), peer, lambda message: line.send(message))
        answers: list[Message] = []
        sent = 0
        while len(answers) < total:
            for _ in range(min(97, total - sent)):
                router.send(large_piece(sent), "engine.0.1")
                sent += 1
            router.flush()
            if sent > 2 * channels.HIGH_WATER_MARK:  # until then the answers pile up
                answers += [message for _, message in router.receive()]
            await asyncio.sleep(0)
        assert numbers(answers) == list(range(total))
        line.close()
        router.close()

    run(body())


def test_closing_from_a_callback_ends_the_reading(run: Any, context: zmq.Context[Any], endpoint: str) -> None:
    async def body() -> None:
        router, peer = connected(context, endpoint)
        for number in range(10):
            router.send(abort(number), "engine.0.1")
        await asyncio.sleep(0.05)
        got: list[Message] = []

        def on_message(message: Message) -> None:
            got.append(message)
            line.close()

        line = LoopChannel(asyncio.get_running_loop(), peer, on_message)
        await _until(lambda: got)
        line.wake()
        await asyncio.sleep(0)
        assert numbers(got) == [0]
        router.close()

    run(body())
