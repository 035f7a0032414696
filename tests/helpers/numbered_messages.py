"""Messages with a number each, so that a test can tell the lost and the swapped, and channels that carry them."""

from __future__ import annotations

import zmq

from tests.helpers.wait import wait_for
from tokservice.wire.channels import Channel, dealer, listen_router
from tokservice.wire.messages import Abort, BodyChunk, Message

TIMEOUT_S = 60.0


def abort(number: int) -> Abort:
    return Abort(str(number))


def large_piece(number: int) -> BodyChunk:
    """Too large for thousands of them to fit into the kernel's buffers, beside ZMQ's own."""
    return BodyChunk(str(number), False, (bytes(4096),))


def numbers(messages: list[Message]) -> list[int]:
    return [int(message.request_id) for message in messages if isinstance(message, (Abort, BodyChunk))]


def receive(channel: Channel, count: int) -> list[tuple[str, Message]]:
    got: list[tuple[str, Message]] = []

    def all_are_there() -> bool:
        got.extend(channel.receive())
        return len(got) >= count

    wait_for(all_are_there, TIMEOUT_S, f"{count} messages")
    return got


def connected(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> tuple[Channel, Channel]:
    """A router and a dealer that it knows."""
    router = listen_router(context, endpoint)
    peer = dealer(context, endpoint, "engine.0.1", "router.0.1")
    peer.send(abort(0))
    assert receive(router, 1) == [("engine.0.1", abort(0))]
    return router, peer
