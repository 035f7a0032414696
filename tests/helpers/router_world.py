"""A whole deployment around a router core, in one thread and in any order: processes that die at any moment,
answer late, and whose messages on different sockets overtake each other.
"""

from __future__ import annotations

import random
import re
from collections import deque
from dataclasses import dataclass, field, replace

from tests.helpers.router import role_of
from tests.helpers.router_workers import KINDS, ROUTER, Plan, Tokenizer, Worker
from tokservice.router.core import RouterCore
from tokservice.runtime.config import RouterConfig, TokenizerConfig
from tokservice.runtime.metrics import Metrics
from tokservice.wire.messages import (
    WIRE_VERSION,
    Abort,
    Accepted,
    Answered,
    BodyChunk,
    EngineLimits,
    Hello,
    Message,
    Peer,
    Prepare,
    Progress,
    ReadyBytes,
    ReadyFlags,
    Rejected,
    Role,
    Submit,
    Topology,
    Undelivered,
)

SLOTS = {Role.API: 2, Role.TOKENIZER: 2, Role.ENGINE: 2, Role.DETOKENIZER: 2}
CAPACITY = 2
EVENT = re.compile(rb"(\d+):(\d+|end);")


@dataclass
class Client:
    """What one client has got."""

    api: str
    plan: Plan
    gone: bool = False
    rows: list[tuple[int, int, bytes]] = field(default_factory=list)

    @property
    def ends(self) -> int:
        return sum(bool(flags & ReadyFlags.LAST) for _, flags, _ in self.rows)


class World:
    """The processes, the lines between them, and chance."""

    def __init__(self, seed: int, share_of_poison: float = 0.0) -> None:
        """``share_of_poison``: of the requests that ask for tokens, how many kill a worker each time."""
        self.rng = random.Random(seed)
        self.share_of_poison = share_of_poison
        self.metrics = Metrics()
        settings = RouterConfig(queue_timeout_s=1e9, total_timeout_s=1e9)
        self.core = RouterCore(settings, TokenizerConfig(workers=SLOTS[Role.TOKENIZER]), self.metrics)
        self.now = 0.0
        self.workers: dict[str, Worker] = {}
        self.to_router: dict[str, deque[Message]] = {}
        self.topologies: deque[Topology] = deque()
        self.version = 0
        self.router_topology = Topology(0, ())  # the last that the router has handled
        self.incarnations: dict[tuple[Role, int], int] = {}
        self.unnoticed: list[str] = []  # deaths that the supervisor has yet to see
        self.in_peace: set[str] = set()
        self.suspects: set[tuple[str, int]] = set()  # what tokenizer and detokenizer workers were killed over
        self.to_start: list[tuple[Role, int]] = []
        self.num_long_waits = 0
        self.clients: dict[str, Client] = {}
        self.uploads: dict[str, int] = {}  # pieces that are still to come
        self.deaths: dict[Role, int] = dict.fromkeys(Role, 0)
        for role, count in SLOTS.items():
            for slot in range(count):
                self.start(role, slot)
        self.settle()

    # --- processes

    def start(self, role: Role, slot: int) -> None:
        incarnation = self.incarnations[role, slot] = self.incarnations.get((role, slot), 0) + 1
        identity = f"{role.label}.{slot}.{incarnation}"
        worker = self.workers[identity] = KINDS[role](self, identity)
        self.announce()
        worker.learn(self.topologies[-1])
        if role is not Role.API:
            worker.to_router(Hello(identity, role, WIRE_VERSION, 1, CAPACITY))

    def leave(self, identity: str) -> None:
        """In peace: its last words arrive."""
        del self.workers[identity]
        self.in_peace.add(identity)
        self.unnoticed.append(identity)

    def kill(self, identity: str) -> None:
        """Its inboxes go with it; a part of what it had sent is still on its way."""
        worker = self.workers.pop(identity)
        prepares = [item for item in worker.inboxes.get(ROUTER.identity, ()) if isinstance(item, Prepare)]
        if isinstance(worker, Tokenizer) and prepares and self.rng.random() < 0.5:
            self.suspects.add((prepares[0].request_id, prepares[0].attempt))
        self.deaths[role_of(identity)] += 1
        self.unnoticed.append(identity)
        line = self.to_router.get(identity, deque())
        for _ in range(self.rng.randint(0, len(line))):
            line.pop()

    def notice(self) -> None:
        """The supervisor sees a death and says so; it starts the next incarnation a little later."""
        identity = self.unnoticed.pop(0)
        label, slot, _ = identity.split(".")
        self.to_start.append((role_of(label), int(slot)))
        self.announce((identity,) if identity in self.in_peace else ())

    def announce(self, left: tuple[str, ...] = ()) -> None:
        self.version += 1
        peers = [Peer(name, role_of(name), (), EngineLimits()) for name in [*self.workers, *self.unnoticed]]
        self.topologies.append(Topology(self.version, (ROUTER, *peers), left))

    # --- clients

    def submit(self) -> None:
        apis = [name for name in self.workers if role_of(name) is Role.API]
        if not apis:
            return
        api = self.rng.choice(apis)
        request_id = f"{api}:{len(self.clients)}"
        num_choices = self.rng.choice((1, 1, 1, 2, 3))
        lengths = tuple(self.rng.randint(1, 12) for _ in range(num_choices))
        stops = tuple(self.rng.choice((0, 0, 0, self.rng.randint(1, length))) for length in lengths)
        kind = self.rng.choice(("stream", "stream", "plain", "plain", "bad", "answer"))
        plan = Plan(kind, lengths, stops)
        if kind in ("stream", "plain") and self.rng.random() < self.share_of_poison:
            kills = self.rng.choice((Role.ENGINE, Role.DETOKENIZER))
            plan = replace(plan, kills=kills, fatal=self.rng.randrange(stops[0] or lengths[0]))
        self.clients[request_id] = Client(api, plan)
        pieces = self.rng.choice((0, 0, 0, 2))
        self.uploads[request_id] = pieces
        submit = Submit(request_id, 1, -1, not pieces, frames=(request_id.encode(),))
        self.workers[api].to_router(submit)

    def body_of(self, request_id: str) -> bytes:
        return request_id.encode()

    def upload(self) -> None:
        waiting = [name for name, pieces in self.uploads.items() if pieces]
        if not waiting:
            return
        request_id = self.rng.choice(waiting)
        client = self.clients[request_id]
        if client.gone or client.api not in self.workers:
            self.uploads[request_id] = 0
            return
        self.uploads[request_id] -= 1
        self.workers[client.api].to_router(BodyChunk(request_id, self.uploads[request_id] == 0))

    def client_leaves(self) -> None:
        present = [
            name
            for name, client in self.clients.items()
            if not client.gone and not client.ends and client.api in self.workers
        ]
        if present:
            request_id = self.rng.choice(present)
            client = self.clients[request_id]
            client.gone = True
            self.workers[client.api].to_router(Abort(request_id))

    # --- the router

    def route(self) -> None:
        """Let the router handle one message of any line; the topology always comes first, as in the process."""
        while self.topologies:
            self.router_topology = self.topologies.popleft()
            self.core.topology(self.router_topology, self.now, self.suspects)
        lines = [name for name, line in self.to_router.items() if line]
        if lines:
            sender = self.rng.choice(lines)
            self.deliver(sender, self.to_router[sender].popleft())
        self.flush()
        self.check_places()

    def deliver(self, sender: str, message: Message) -> None:
        core, now = self.core, self.now
        match message:
            case Submit():
                core.submit(sender, message, now)
            case BodyChunk():
                core.body_chunk(message, now)
            case Abort():
                core.client_gone(message)
            case Hello():
                core.hello(message, now)
            case Accepted():
                core.accepted(sender, message, now)
            case Rejected():
                core.rejected(sender, message, now)
            case Answered():
                core.answered(sender, message, now)
            case Undelivered():
                core.undelivered(message, now)
            case Progress():
                core.progress(message, now)

    def flush(self) -> None:
        for identity, message in self.core.outbox:
            worker = self.workers.get(identity)
            if worker is not None:  # else it has died, and the message vanishes
                assert (role_of(identity) is Role.API) == isinstance(message, ReadyBytes)
                if worker.told < self.router_topology.version:  # it was sent to all before this, and is read first
                    worker.told = self.router_topology.version
                    worker.put(ROUTER.identity, self.router_topology)
                worker.put(ROUTER.identity, message)
        self.core.outbox.clear()

    def tick(self) -> None:
        self.now += 0.02
        self.core.tick(self.now)
        self.flush()
        self.check_places()

    def check_places(self) -> None:
        for worker in self.core._pool._workers.values():
            assert len(worker.in_flight) <= CAPACITY
        assert self.core.ledger.held_bytes == sum(request.held_bytes for request in self.core.ledger)
        assert all(
            load >= 0
            for workers in (self.core.ledger.engines, self.core.ledger.detokenizers)
            for load in workers.loads.values()
        )

    # --- chance

    def act(self) -> None:
        """Any one thing that can happen by itself."""
        what = self.rng.random()
        if what < 0.35:
            self.route()
        elif what < 0.40:
            self.tick()
        elif what < 0.45 and self.unnoticed:
            self.notice()
        elif what < 0.46 and self.to_start:
            self.start(*self.to_start.pop(0))
        elif what < 0.50 and self.workers:
            worker = self.rng.choice(list(self.workers.values()))
            worker.learn(self.router_topology)  # the router is told first
        elif what < 0.55:
            self.upload()
        else:
            busy = [worker for worker in self.workers.values() if worker.has_work()]
            if busy:
                self.rng.choice(busy).act(self.rng)

    def wait_long(self) -> None:
        """Longer than a tokenizer worker may take."""
        self.now += 11.0
        self.num_long_waits += 1
        self.tick()

    def settle(self, max_steps: int = 50_000) -> None:
        """Let everything run its course, without further deaths."""
        for _ in range(max_steps):
            quiet = not (
                self.unnoticed
                or self.to_start
                or self.topologies
                or any(self.to_router.values())
                or any(self.uploads.values())
                or any(worker.has_work() for worker in self.workers.values())
                or self.core.num_unfinished
            )
            if quiet:
                break
            self.act()
        for worker in self.workers.values():
            worker.learn(self.router_topology)

    # --- what must hold

    def check(self) -> None:
        core = self.core
        stuck = {item.request_id: (item.state.name, item.cancelled) for item in core.ledger}
        assert not stuck, stuck
        core.report()
        assert core.ledger.held_bytes == 0
        assert not core.ledger.parked
        assert core._pool.num_waiting == core._pool.num_in_flight == 0
        for workers in (core.ledger.engines, core.ledger.detokenizers):
            assert not any(workers.loads.values())
        for worker in self.workers.values():
            assert not getattr(worker, "running", {}), "an engine works for nobody"
            assert not getattr(worker, "open", {}), "a detokenizer waits for nobody"
        for request_id, client in self.clients.items():
            self.check_client(request_id, client)

    def check_client(self, request_id: str, client: Client) -> None:
        if client.api not in self.workers:
            return
        assert client.ends <= 1, f"{request_id} ended {client.ends} times"
        if client.gone:
            return
        assert client.ends == 1, f"{request_id} has no end: {client.rows}"
        assert client.rows[-1][1] & ReadyFlags.LAST, "something after the end"
        opened = [status for status, _, _ in client.rows if status]
        assert len(opened) == 1, f"{request_id} has {len(opened)} heads: {client.rows}"
        assert client.rows[0][0], "bytes before the head"
        data = b"".join(data for _, _, data in client.rows)
        failed = b'"error"' in data
        if client.plan.kills is not None:
            assert failed, f"{request_id} cannot have been answered: {data!r}"
            assert b'"engine_error"' in data
        elif failed:
            assert self.may_fail(), f"{request_id} failed: {data!r}"
        if failed:
            data = data.partition(b"data: ")[0] if client.rows[0][1] & ReadyFlags.STREAM else b""
        expected = {"bad": (400, b"bad"), "answer": (200, b"answer")}.get(client.plan.kind)
        if expected is not None and not failed:
            assert (opened[0], data) == expected
        elif expected is None:
            self.check_text(client.plan, data, whole=not failed)

    def may_fail(self) -> bool:
        """Whether a request may be given up: one death, or one stall, must never be seen; nor the deaths that
        another request is to blame for."""
        return not self.share_of_poison and sum(self.deaths.values()) + self.num_long_waits >= 2

    @property
    def num_poisoned(self) -> int:
        """Requests that kill workers."""
        return sum(client.plan.kills is not None for client in self.clients.values())

    def check_text(self, plan: Plan, data: bytes, *, whole: bool) -> None:
        assert b"".join(match.group() for match in EVENT.finditer(data)) == data
        for choice, length in enumerate(plan.lengths):
            count = plan.stops[choice] or length
            expected = [b"%d" % token for token in range(count)] + [b"end"]
            got = [match[2] for match in EVENT.finditer(data) if int(match[1]) == choice]
            assert got == expected[: len(got)], f"choice {choice}: {got}"
            assert not whole or got == expected, f"choice {choice} is not complete: {got}"
