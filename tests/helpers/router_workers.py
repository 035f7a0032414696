"""Models of the processes around a router, as far as the router can tell: what they send when, what they ignore, what
vanishes with them.

Choice c of request r produces tokens 0, 1, 2, ... up to a length of its own; the text of token t of choice c is
``c:t;``, and the detokenizer holds the newest token's text back until the next one, as a real one does with the
beginnings of stop strings. So a client can tell every lost, doubled or swapped token.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.helpers.router import ids, numbers
from tokservice.wire.messages import (
    ALL_CHOICES,
    Abort,
    Accepted,
    Answered,
    Begin,
    EngineLimits,
    FinishReason,
    Generate,
    Message,
    Peer,
    Prepare,
    Progress,
    ReadyFlags,
    Rejected,
    Role,
    Topology,
    Undelivered,
)

if TYPE_CHECKING:
    from tests.helpers.router_world import World

RUNNING, STOP, LENGTH, ABORT = FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
ROUTER = Peer("router.0.1", Role.ROUTER, (), EngineLimits())


@dataclass
class Plan:
    """What is to become of a request."""

    kind: str  # stream, plain, bad, answer
    lengths: tuple[int, ...]  # tokens of each choice
    stops: tuple[int, ...]  # of each choice: tokens after which a stop string ends it; 0: none
    kills: Role | None = None  # whom it kills,
    fatal: int = -1  # whenever that one has to do with this token of choice 0


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
            current = self.running.get(output.request_id)
            if current is not None and current.attempt == output.attempt and not self.deliver(current, output):
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
        tokens, reason, flags = row.tokens, row.reason, int(ReadyFlags.NONE)
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
            (flags,),
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
