"""Connections that follow the topology: to the one router, and to every process of a role."""

from __future__ import annotations

from collections.abc import Callable

from tokservice.runtime.process import Process
from tokservice.wire.channels import Channel, dealer, push
from tokservice.wire.errors import PeerLost
from tokservice.wire.messages import Hello, Message, Role, Topology

ROUTER_API_ENDPOINT = 0
ROUTER_WORKER_ENDPOINT = 1


class RouterLink:
    """A worker's line to the living router. A new router knows nothing: ``on_new_router`` drops all work."""

    def __init__(
        self,
        process: Process,
        hello: Callable[[], Hello],
        on_message: Callable[[Message], None],
        on_new_router: Callable[[], None],
    ) -> None:
        self._process = process
        self._hello = hello
        self._on_message = on_message
        self._on_new_router = on_new_router
        self._channel: Channel | None = None
        self._router = ""

    def follow(self, topology: Topology) -> None:
        """Connect to the router that the topology names, and greet it."""
        router = next((peer for peer in topology.peers if peer.role == Role.ROUTER), None)
        if router is not None and router.identity == self._router:
            return
        if self._channel is not None:
            self._process.remove(self._channel)
            self._channel = None
            self._router = ""
            self._on_new_router()
        if router is not None:
            endpoint = router.endpoints[ROUTER_WORKER_ENDPOINT]
            self._channel = dealer(self._process.context, endpoint, self._process.identity, router.identity)
            self._router = router.identity
            self._process.add(self._channel, lambda _, message: self._on_message(message))
            self.send(self._hello())

    def send(self, message: Message) -> None:
        """Send to the router; without one the message is moot and dropped.

        Raises PeerLost where the router is too far behind. Nobody catches it: what followed a lost message would
        be wrong (text with a gap), so the worker ends, and the router begins its requests again.
        """
        if self._channel is not None:
            self._channel.send(message)


class PeerLinks:
    """One-way lines to the inboxes of every process of a role."""

    def __init__(self, process: Process, role: Role) -> None:
        self._process = process
        self._role = role
        self._channels: dict[str, Channel] = {}

    def follow(self, topology: Topology) -> None:
        """Open lines to new processes; close those to the dead, with all that is unsent."""
        living = {peer.identity: peer.endpoints[0] for peer in topology.peers if peer.role == self._role}
        for identity in self._channels.keys() - living.keys():
            self._process.remove(self._channels.pop(identity))
        for identity in living.keys() - self._channels.keys():
            channel = push(self._process.context, living[identity], identity)
            self._process.add(channel)
            self._channels[identity] = channel

    def send(self, identity: str, message: Message) -> None:
        """Send to one process. Raises PeerLost where it is unknown, dead or too far behind."""
        channel = self._channels.get(identity)
        if channel is None:
            raise PeerLost(identity, "not in the topology")
        channel.send(message)
