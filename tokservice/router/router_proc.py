"""The router process: sockets around ``RouterCore``.

Two sockets are bound: one for the API processes, one for all workers. Headers alone are decoded here; bodies,
token ids and finished bytes pass through as they are. Nobody is heard whom the topology does not name: what a peer
says before waits for it, and strangers are given no work and no place.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

from tokservice.router.core import RouterCore
from tokservice.runtime.metrics import Metrics
from tokservice.runtime.process import Process, run_process
from tokservice.runtime.work_mark import take_mark
from tokservice.wire.channels import listen_router
from tokservice.wire.errors import PeerLost
from tokservice.wire.messages import (
    Abort,
    Accepted,
    Answered,
    BodyChunk,
    Hello,
    Message,
    Progress,
    ReadyBytes,
    ReadyFlags,
    Rejected,
    Role,
    Submit,
    Topology,
    Undelivered,
)

MAX_EARLY_MESSAGES = 1000  # of peers that the topology does not name yet; then the oldest are dropped

log = logging.getLogger(__name__)


class Router:
    """The service that ``Process.run`` drives."""

    def __init__(self, process: Process) -> None:
        self._core = RouterCore(process.config.router, process.config.tokenizer, process.metrics)
        self._process = process
        self._peers: set[str] = set()
        self._early = deque[tuple[Callable[[str, Message], None], str, Message]](maxlen=MAX_EARLY_MESSAGES)
        self._num_messages = 0
        self._told_drained = False
        self._apis = listen_router(process.context, process.endpoint("api"))
        self._workers = listen_router(process.context, process.endpoint("work"))
        self.endpoints = (self._apis.endpoint, self._workers.endpoint)
        process.add(self._workers, self._from_worker)
        process.add(self._apis, self._from_api)

    def on_topology(self, topology: Topology) -> None:
        """See ``Service``."""
        peers = {peer.identity for peer in topology.peers}
        marks = {identity: take_mark(self._process.run_dir, identity) for identity in self._peers - peers}
        self._peers = peers
        suspects = {mark for identity, mark in marks.items() if mark is not None and identity not in topology.left}
        self._core.topology(topology, time.monotonic(), suspects)
        self._send_all()
        early, self._early = self._early, deque(maxlen=MAX_EARLY_MESSAGES)
        for hear, sender, message in early:
            hear(sender, message)  # which may have to wait again

    def turn(self, now: float) -> float:
        """See ``Service``."""
        pause_s = self._core.tick(now)
        self._send_all()
        if self._core.draining and not self._core.num_unfinished and not self._told_drained:
            self._told_drained = True
            self._process.beat(self.report)  # the supervisor waits for this
        return pause_s

    def drain(self) -> None:
        """See ``Service``."""
        self._core.draining = True

    def report(self, metrics: Metrics) -> tuple[int, int]:
        """See ``Service``."""
        self._core.report()
        return self._num_messages, self._core.num_unfinished

    def leave(self) -> None:
        """End what is unfinished with an error that clients can read."""
        self._core.fail_all()
        self._send_all()

    def _from_api(self, sender: str, message: Message) -> None:
        if sender not in self._peers:
            self._early.append((self._from_api, sender, message))
            return
        self._num_messages += 1
        match message:
            case Submit():
                self._core.submit(sender, message, time.monotonic())
            case BodyChunk():
                self._core.body_chunk(message, time.monotonic())
            case Abort():
                self._core.client_gone(message)
        self._send_all()

    def _from_worker(self, sender: str, message: Message) -> None:
        if sender not in self._peers:
            self._early.append((self._from_worker, sender, message))
            return
        self._num_messages += 1
        match message:
            case Progress():
                self._core.progress(message, time.monotonic())
            case Accepted():
                self._core.accepted(sender, message, time.monotonic())
            case Rejected():
                self._core.rejected(sender, message, time.monotonic())
            case Answered():
                self._core.answered(sender, message, time.monotonic())
            case Undelivered():
                self._core.undelivered(message, time.monotonic())
            case Hello() if message.identity == sender:
                self._core.hello(message, time.monotonic())
                log.info("worker connected identity=%s", sender)
        self._send_all()

    def _send_all(self) -> None:
        outbox = self._core.outbox
        for identity, message in outbox:  # which may grow meanwhile
            channel = self._apis if identity.startswith(Role.API.label) else self._workers
            try:
                channel.send(message, identity, always=_must_arrive(message))
            except PeerLost as lost:
                # If it is dead, the supervisor notices, and the next topology says so.
                log.warning("message lost type=%s peer=%s", type(message).__name__, lost)
                if isinstance(message, ReadyBytes):
                    self._core.bytes_lost(message)
        outbox.clear()


def _must_arrive(message: Message) -> bool:
    """Whether a living peer gets it however far behind it is: the work and the ends of the requests that were
    admitted. Text of a stream is not: a stream without it is ended instead."""
    if isinstance(message, ReadyBytes):
        return any(flags & ReadyFlags.LAST for flags in message.flags)
    return not isinstance(message, Abort)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry: ``python -m tokservice.router.router_proc --config FILE``."""

    def body(process: Process) -> int:
        router = Router(process)
        process.control.send(process.hello(endpoints=router.endpoints))
        code = process.run(router)
        router.leave()
        return code

    return run_process(Role.ROUTER, argv, body)


if __name__ == "__main__":
    sys.exit(main())
