"""A whole deployment around a router core, in one thread and in any order: processes that die at any moment,
answer late, and whose messages on different sockets overtake each other.

The workers are models of the real ones, as far as the router can tell: what they send when, what they ignore,
what vanishes with them. Choice c of request r produces tokens 0, 1, 2, ... up to a length of its own; the text of
token t of choice c is ``c:t;``, and the detokenizer holds the newest token's text back until the next one, as a
real one does with the beginnings of stop strings. So a client can tell every lost, doubled or swapped token.
"""

from __future__ import annotations

import random
import re
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from tests.helpers.router import ids, numbers, role_of
from tokservice.router.core import RouterCore
from tokservice.runtime.config import RouterConfig
from tokservice.runtime.metrics import Metrics
from tokservice.wire.messages import (
    ALL_CHOICES,
    WIRE_VERSION,
    Abort,
    Accepted,
    Answered,
    Begin,
    BodyChunk,
    EngineLimits,
    FinishReason,
    Generate,
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

RUNNING, STOP, LENGTH, ABORT = FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
SLOTS = {Role.API: 2, Role.TOKENIZER: 2, Role.ENGINE: 2, Role.DETOKENIZER: 2}
CAPACITY = 2
ROUTER = Peer("router.0.1", Role.ROUTER, (), EngineLimits())
EVENT = re.compile(rb"(\d+):(\d+|end);")


@dataclass
class Plan:
    """What is to become of a request."""

    kind: str  # stream, plain, bad, answer
    lengths: tuple[int, ...]  # tokens of each choice
    stops: tuple[int, ...]  # of each choice: tokens after which a stop string ends it; 0: none
    kills: Role | None = None  # whom it kills,
    fatal: int = -1  # whenever that one has to do with this token of choice 0


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


@dataclass
class Output:
    """A row of engine output: a choice's new tokens."""

    request_id: str
    attempt: int
    choice: int
    tokens: list[int]
    reason: int


class Worker:
    """A process: what is on its way to it, and what it believes to live."""

    def __init__(self, world: World, identity: str) -> None:
        self.world = world
        self.identity = identity
        self.inboxes: dict[str, deque[Any]] = {}  # by sender: one ordered line each
        self.view: set[str] = set()
        self.version = 0  # of the topology that it knows
        self.told = 0  # of the last topology before a message of the router's

    def put(self, sender: str, message: Any) -> None:
        self.inboxes.setdefault(sender, deque()).append(message)

    def has_work(self) -> bool:
        return any(self.inboxes.values())

    def act(self, rng: random.Random) -> None:
        """Handle one message of any line."""
        inbox = rng.choice([inbox for inbox in self.inboxes.values() if inbox])
        message = inbox.popleft()
        if isinstance(message, Topology):
            self.learn(message)
        else:
            self.handle(message)

    def handle(self, message: Any) -> None:
        raise NotImplementedError

    def learn(self, topology: Topology) -> None:
        """A topology has arrived."""
        if topology.version > self.version:
            self.version = topology.version
            self.view = {peer.identity for peer in topology.peers}

    def to_peer(self, identity: str, message: Any, request_id: str, attempt: int) -> bool:
        if identity not in self.view:
            self.to_router(Undelivered((request_id,), (attempt,)))
            return False
        if identity in self.world.workers:  # else it has died, and the message vanishes
            self.world.workers[identity].put(self.identity, message)
        return True

    def to_router(self, message: Message) -> None:
        self.world.to_router.setdefault(self.identity, deque()).append(message)


class Tokenizer(Worker):
    def handle(self, message: Any) -> None:
        if isinstance(message, Abort):
            inbox = self.inboxes[ROUTER.identity]
            for waiting in inbox:
                if isinstance(waiting, Prepare) and (waiting.request_id, waiting.attempt) == (
                    message.request_id,
                    message.attempt,
                ):
                    inbox.remove(waiting)
                    self.to_router(Rejected(message.request_id, message.attempt, 499, (b"gone",)))
                    return
            return
        assert isinstance(message, Prepare)
        assert b"".join(message.frames) == self.world.body_of(message.request_id), "a body was not passed on whole"
        plan = self.world.clients[message.request_id].plan
        if plan.kind == "bad":
            self.to_router(Rejected(message.request_id, message.attempt, 400, (b"bad",)))
        elif plan.kind == "answer":
            self.to_router(Answered(message.request_id, message.attempt, (b"answer",)))
        else:
            frames = (b"sampling", message.request_id.encode(), ids(1))
            stream = plan.kind == "stream"
            self.to_router(Accepted(message.request_id, message.attempt, stream, len(plan.lengths), 1, frames))
            generate = Generate(message.request_id, message.attempt, message.detokenizer, 1, frames=frames)
            self.to_peer(message.engine, generate, message.request_id, message.attempt)


@dataclass
class EngineRun:
    attempt: int
    detokenizer: str
    num_tokens: dict[int, int]  # of each unfinished choice


class Engine(Worker):
    def __init__(self, world: World, identity: str) -> None:
        super().__init__(world, identity)
        self.running: dict[str, EngineRun] = {}
        self.early_aborts: dict[str, int] = {}
        self.ended: list[Output] = []

    def has_work(self) -> bool:
        return super().has_work() or bool(self.running) or bool(self.ended)

    def act(self, rng: random.Random) -> None:
        if super().has_work() and rng.random() < 0.5:
            super().act(rng)
        else:
            self.step(rng)

    def handle(self, message: Any) -> None:
        if isinstance(message, Abort):
            run = self.running.get(message.request_id)
            if run is not None and run.attempt <= message.attempt:
                for choice in list(run.num_tokens):
                    if message.choice in (choice, ALL_CHOICES):
                        self.ended.append(Output(message.request_id, run.attempt, choice, [], ABORT))
                        del run.num_tokens[choice]
            elif run is None and message.choice == ALL_CHOICES:
                self.early_aborts[message.request_id] = max(
                    message.attempt, self.early_aborts.get(message.request_id, 0)
                )
            return
        assert isinstance(message, Generate)
        run = self.running.get(message.request_id)
        if run is not None and run.attempt >= message.attempt:
            return
        outputs = [numbers(frame) for frame in message.frames[3:]]
        plan = self.world.clients[message.request_id].plan
        assert all(tokens == list(range(len(tokens))) for tokens in outputs), "the journal has a gap"
        finished = message.finished or (RUNNING,) * len(plan.lengths)
        outputs = outputs or [[] for _ in plan.lengths]
        unfinished = {choice: len(outputs[choice]) for choice, reason in enumerate(finished) if reason == RUNNING}
        assert unfinished, "begun again though everything is finished"
        self.ended = [output for output in self.ended if output.request_id != message.request_id]
        begin = Begin(
            message.request_id,
            message.attempt,
            self.identity,
            message.num_delivered,
            message.finished,
            frames=(b"context", *message.frames[3:]),
        )
        self.running.pop(message.request_id, None)
        if not self.to_peer(message.detokenizer, begin, message.request_id, message.attempt):
            return
        self.running[message.request_id] = EngineRun(message.attempt, message.detokenizer, unfinished)
        if self.early_aborts.pop(message.request_id, 0) >= message.attempt:
            self.handle(Abort(message.request_id, message.attempt))

    def step(self, rng: random.Random) -> None:
        outputs, self.ended = self.ended, []
        for request_id, run in self.running.items():
            plan = self.world.clients[request_id].plan
            for choice in list(run.num_tokens):
                if rng.random() < 0.7:
                    start = run.num_tokens[choice]
                    end = min(start + rng.randint(1, 3), plan.lengths[choice])
                    if plan.kills is Role.ENGINE and choice == 0 and start <= plan.fatal < end:
                        self.world.kill(self.identity)
                        return
                    reason = LENGTH if end == plan.lengths[choice] else RUNNING
                    outputs.append(Output(request_id, run.attempt, choice, list(range(start, end)), reason))
                    run.num_tokens[choice] = end
                    if reason:
                        del run.num_tokens[choice]
        for output in outputs:
            run = self.running.get(output.request_id)
            if run is not None and run.attempt == output.attempt and not self.deliver(run, output):
                del self.running[output.request_id]
        for request_id in [key for key, run in self.running.items() if not run.num_tokens]:
            del self.running[request_id]

    def deliver(self, run: EngineRun, output: Output) -> bool:
        return self.to_peer(run.detokenizer, output, output.request_id, output.attempt)


@dataclass
class DetokenizerRun:
    attempt: int
    engine: str
    plan: Plan
    consumed: list[int]
    delivered: list[int]  # tokens whose text has been given out
    reasons: list[int]


class Detokenizer(Worker):
    def __init__(self, world: World, identity: str) -> None:
        super().__init__(world, identity)
        self.open: dict[str, DetokenizerRun] = {}
        self.ended: dict[str, int] = {}

    def learn(self, topology: Topology) -> None:
        super().learn(topology)
        self.open = {key: run for key, run in self.open.items() if run.engine in self.view}

    def handle(self, message: Any) -> None:
        match message:
            case Abort():
                run = self.open.get(message.request_id)
                if run is not None and run.attempt <= message.attempt:
                    del self.open[message.request_id]
                self.ended[message.request_id] = max(message.attempt, self.ended.get(message.request_id, 0))
            case Begin():
                self.begin(message)
            case Output():
                self.output(message)

    def begin(self, message: Begin) -> None:
        run = self.open.get(message.request_id)
        if message.attempt <= max(self.ended.get(message.request_id, 0), run.attempt if run else 0):
            return
        plan = self.world.clients[message.request_id].plan
        outputs = [len(frame) // 4 for frame in message.frames[1:]] or [0] * len(plan.lengths)
        assert tuple(message.num_delivered or outputs) == tuple(outputs)
        reasons = list(message.finished) or [RUNNING] * len(outputs)
        shown = [count if reason else max(0, count - 1) for count, reason in zip(outputs, reasons, strict=True)]
        self.open[message.request_id] = DetokenizerRun(message.attempt, message.engine, plan, outputs, shown, reasons)

    def output(self, row: Output) -> None:
        run = self.open.get(row.request_id)
        if run is None or run.attempt != row.attempt:
            known = max(self.ended.get(row.request_id, 0), run.attempt if run else 0)
            if row.attempt > known:
                self.to_router(Undelivered((row.request_id,), (row.attempt,)))
            return
        if run.reasons[row.choice]:
            return
        before = run.consumed[row.choice]
        assert row.tokens == list(range(before, before + len(row.tokens))), "the engine's output has a gap"
        if run.plan.kills is Role.DETOKENIZER and row.choice == 0 and run.plan.fatal in row.tokens:
            self.world.suspects.add((row.request_id, row.attempt))
            self.world.kill(self.identity)
            return
        tokens, reason, flags = row.tokens, row.reason, ReadyFlags.NONE
        stop = run.plan.stops[row.choice]
        if stop and before + len(tokens) >= stop:
            tokens = tokens[: stop - before]
            flags |= ReadyFlags.STOPPED if reason == RUNNING else ReadyFlags.NONE
            reason = STOP
        run.consumed[row.choice] = count = before + len(tokens)
        run.reasons[row.choice] = reason
        data = b""
        if run.plan.kind == "stream":
            flags |= ReadyFlags.STREAM
            shown = count if reason else max(0, count - 1)
            data = b"".join(b"%d:%d;" % (row.choice, token) for token in range(run.delivered[row.choice], shown))
            run.delivered[row.choice] = shown
            data += b"%d:end;" % row.choice if reason in (STOP, LENGTH) else b""
        status = 0
        if all(run.reasons):
            flags |= ReadyFlags.LAST
            if run.plan.kind == "plain" and ABORT not in run.reasons:
                status = 200
                data = b"".join(
                    b"%d:%d;" % (choice, token) for choice, n in enumerate(run.consumed) for token in range(n)
                ) + b"".join(b"%d:end;" % choice for choice in range(len(run.consumed)))
            del self.open[row.request_id]
            self.ended[row.request_id] = row.attempt
        progress = Progress(
            (row.request_id,),
            (row.attempt,),
            (row.choice,),
            (len(tokens),),
            (reason,),
            (status,),
            (int(flags),),
            (len(data),),
            frames=(ids(*tokens), data),
        )
        self.to_router(progress)


class Api(Worker):
    def handle(self, message: Any) -> None:
        start = 0
        for request_id, status, flags, num_bytes in zip(
            message.request_ids, message.statuses, message.flags, message.num_bytes, strict=True
        ):
            data = bytes(memoryview(message.frames[0])[start : start + num_bytes])
            start += num_bytes
            client = self.world.clients[request_id]
            assert client.api == self.identity, "bytes for the client of another process"
            client.rows.append((status, flags, data))


KINDS: dict[Role, type[Worker]] = {
    Role.API: Api,
    Role.TOKENIZER: Tokenizer,
    Role.ENGINE: Engine,
    Role.DETOKENIZER: Detokenizer,
}


class World:
    """The processes, the lines between them, and chance."""

    def __init__(self, seed: int, share_of_poison: float = 0.0) -> None:
        """``share_of_poison``: of the requests that ask for tokens, how many kill a worker each time."""
        self.rng = random.Random(seed)
        self.share_of_poison = share_of_poison
        self.metrics = Metrics()
        settings = RouterConfig(queue_timeout_s=1e9, total_timeout_s=1e9)
        self.core = RouterCore(settings, SLOTS[Role.TOKENIZER], self.metrics)
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
