"""A router core on a bench: processes that live and die by name, and what the router sends to each."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from typing import Any, TypeVar

from tokservice.router.core import RouterCore
from tokservice.runtime.config import RouterConfig, TokenizerConfig
from tokservice.runtime.metrics import Metrics
from tokservice.wire import codec
from tokservice.wire.messages import (
    WIRE_VERSION,
    Abort,
    Accepted,
    Answered,
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
    Route,
    Submit,
    Topology,
    Undelivered,
)

API, TOKENIZER_0, TOKENIZER_1 = "api.0.1", "tokenizer.0.1", "tokenizer.1.1"
ENGINE, DETOKENIZER = "engine.0.1", "detokenizer.0.1"
ROUTER = "router.0.1"
EVERYONE = (ROUTER, API, TOKENIZER_0, TOKENIZER_1, ENGINE, DETOKENIZER)
ROLES = {role.label: role for role in Role}

M = TypeVar("M")


def role_of(identity: str) -> Role:
    """From the identity's first part."""
    return ROLES[identity.partition(".")[0]]


def ids(*token_ids: int) -> bytes:
    """Token ids as they travel."""
    return array("I", token_ids).tobytes()


def numbers(frame: Any) -> list[int]:
    """The inverse."""
    return list(memoryview(frame).cast("B").cast("I"))


def status_and_code(answer: tuple[int, bytes]) -> tuple[int, str]:
    """Of an error, given its status and body."""
    return answer[0], json.loads(answer[1])["error"]["code"]


class Bench:
    """The core, its clock, and the messages that it has sent."""

    def __init__(self, *, everyone: Sequence[str] = EVERYONE, capacity: int = 4, **settings: Any) -> None:
        self.metrics = Metrics()
        self.core = RouterCore(RouterConfig(**settings), TokenizerConfig(workers=2), self.metrics)
        self.now = 100.0
        self.capacity = capacity
        self.sent: list[tuple[str, Message]] = []
        self.living: list[str] = []
        self._version = 0
        self.live(*everyone)

    # --- processes

    def live(self, *identities: str) -> None:
        """They get ready: the topology names them, then the workers among them say hello."""
        self.living += identities
        self.announce()
        for identity in identities:
            if role_of(identity) in (Role.TOKENIZER, Role.DETOKENIZER, Role.ENGINE):
                self.hello(identity)

    def die(self, *identities: str, idle: bool = False, over: str = "") -> None:
        """They are gone: the topology no longer names them. Tokenizer workers were busy with what they got first,
        or ``idle``; a detokenizer with the request that it died ``over``."""
        self.living = [identity for identity in self.living if identity not in identities]
        workers = [worker for name, worker in self.core._pool._workers.items() if name in identities and not idle]
        suspects = [next(iter(worker.in_flight)) for worker in workers if worker.in_flight]
        self.announce(suspects=suspects + ([(over, self.attempt_of(over))] if over else []))

    def leave(self, *identities: str) -> None:
        """They have ended in peace."""
        self.living = [identity for identity in self.living if identity not in identities]
        self.announce(identities)

    def announce(self, left: tuple[str, ...] = (), suspects: Sequence[tuple[str, int]] = ()) -> None:
        self._version += 1
        peers = tuple(Peer(identity, role_of(identity), (), EngineLimits()) for identity in self.living)
        self.core.topology(Topology(self._version, peers, left), self.now, suspects)
        self._take()

    def hello(self, identity: str) -> None:
        self.core.hello(Hello(identity, role_of(identity), WIRE_VERSION, 1, self.capacity), self.now)
        self._take()

    # --- what API processes say

    def submit(
        self,
        request_id: str,
        body: bytes = b"{}",
        *,
        api: str = API,
        content_length: int | None = None,
        complete: bool = True,
    ) -> None:
        frames = (body,) if body else ()
        length = len(body) if content_length is None else content_length
        self.core.submit(api, Submit(request_id, Route.COMPLETIONS, length, complete, frames=frames), self.now)
        self._take()

    def chunk(self, request_id: str, data: bytes, *, complete: bool = False) -> None:
        self.core.body_chunk(BodyChunk(request_id, complete, (data,) if data else ()), self.now)
        self._take()

    def client_gone(self, request_id: str) -> None:
        self.core.client_gone(Abort(request_id))
        self._take()

    # --- what workers say

    def accept(
        self, request_id: str, *, attempt: int | None = None, stream: bool = True, choices: int = 1, worker: str = ""
    ) -> None:
        attempt = attempt or self.last(Prepare, request_id).attempt
        frames = (b"sampling", b"context", ids(1, 2, 3))
        message = Accepted(request_id, attempt, stream, choices, 3, frames)
        self.core.accepted(worker or self.worker_of(request_id), message, self.now)
        self._take()

    def reject(self, request_id: str, *, status: int = 400, attempt: int | None = None) -> None:
        prepare = self.last(Prepare, request_id)
        message = Rejected(request_id, attempt or prepare.attempt, status, (b"bad",))
        self.core.rejected(self.worker_of(request_id), message, self.now)
        self._take()

    def answer(self, request_id: str) -> None:
        prepare = self.last(Prepare, request_id)
        self.core.answered(self.worker_of(request_id), Answered(request_id, prepare.attempt, (b"answer",)), self.now)
        self._take()

    def undelivered(self, request_id: str, attempt: int) -> None:
        self.core.undelivered(Undelivered((request_id,), (attempt,)), self.now)
        self._take()

    def progress(
        self,
        request_id: str,
        *token_ids: int,
        attempt: int = 1,
        choice: int = 0,
        data: bytes = b"",
        reason: FinishReason = FinishReason.RUNNING,
        status: int = 0,
        flags: int = ReadyFlags.STREAM,
    ) -> None:
        message = Progress(
            (request_id,),
            (attempt,),
            (choice,),
            (len(token_ids),),
            (reason,),
            (status,),
            (flags,),
            (len(data),),
            frames=(ids(*token_ids), data),
        )
        self.core.progress(codec.decode(codec.encode(message)), self.now)  # type: ignore[arg-type]
        self._take()

    def finish(self, request_id: str, *, attempt: int = 1, reason: FinishReason = FinishReason.STOP) -> None:
        """The last row of a stream of one choice."""
        flags = ReadyFlags.STREAM | ReadyFlags.LAST
        data = b"" if reason is FinishReason.ABORT else b"end"
        self.progress(request_id, attempt=attempt, data=data, reason=reason, flags=flags)

    # --- time

    def tick(self, seconds: float = 0.0) -> float:
        self.now += seconds
        pause_s = self.core.tick(self.now)
        self._take()
        return pause_s

    # --- what the router has sent

    def _take(self) -> None:
        for identity, message in self.core.outbox:
            codec.decode([bytes(memoryview(frame)) for frame in codec.encode(message)])  # it must be a valid one
            self.sent.append((identity, message))
        self.core.outbox.clear()

    def forget_sent(self) -> None:
        self.sent.clear()

    def sent_to(self, identity: str, kind: type[M]) -> list[M]:
        return [message for to, message in self.sent if to == identity and isinstance(message, kind)]

    def last(self, kind: type[M], request_id: str) -> M:
        """The newest message of a kind about a request."""
        return self._last(kind, request_id)[1]

    def worker_of(self, request_id: str) -> str:
        """The tokenizer worker that was given its body last."""
        return self._last(Prepare, request_id)[0]

    def _last(self, kind: type[M], request_id: str) -> tuple[str, M]:
        of_it = [
            (to, message)
            for to, message in self.sent
            if isinstance(message, kind) and getattr(message, "request_id", "") == request_id
        ]
        assert of_it, f"no {kind.__name__} for {request_id}"
        return of_it[-1]

    def count(self, kind: type[M], request_id: str) -> int:
        return sum(
            isinstance(message, kind) and getattr(message, "request_id", "") == request_id for _, message in self.sent
        )

    def rows(self, request_id: str, api: str = API) -> list[tuple[int, int, bytes]]:
        """What a client got: (status, flags, bytes) of each row."""
        rows = []
        for message in self.sent_to(api, ReadyBytes):
            start = 0
            for row_id, status, flags, num_bytes in zip(
                message.request_ids, message.statuses, message.flags, message.num_bytes, strict=True
            ):
                if row_id == request_id:
                    rows.append((status, flags, bytes(memoryview(message.frames[0])[start : start + num_bytes])))
                start += num_bytes
        return rows

    def end_of(self, request_id: str, api: str = API) -> tuple[int, bytes]:
        """Status and bytes of the one row that ended the response."""
        ends = [(status, data) for status, flags, data in self.rows(request_id, api) if flags & ReadyFlags.LAST]
        assert len(ends) == 1, f"{len(ends)} ends of {request_id}"
        return ends[0]

    def attempt_of(self, request_id: str) -> int:
        """The attempt that the router waits for."""
        return self.core.ledger[request_id].attempt

    def gauges(self) -> dict[str, float]:
        self.core.report()
        return {
            metric.name: metric.values[0]
            for metric in self.metrics.snapshot()
            if metric.name.startswith(("num_requests", "unfinished"))
        }

    def assert_empty(self) -> None:
        """Nothing is left: no record, no byte held, no weight on any worker."""
        assert self.core.num_unfinished == 0
        assert all(value == 0 for value in self.gauges().values()), self.gauges()
        assert not self.core.ledger.parked
        assert all(
            load == 0
            for workers in (self.core.ledger.engines, self.core.ledger.detokenizers)
            for load in workers.loads.values()
        )

    # --- shortcuts

    def running(self, request_id: str, *token_ids: int, stream: bool = True, choices: int = 1) -> None:
        """A request that an engine runs, with some output."""
        self.submit(request_id)
        self.accept(request_id, stream=stream, choices=choices)
        if token_ids:
            self.progress(request_id, *token_ids, data=b"text" if stream else b"")

    def resumed(self, request_id: str) -> Generate:
        """The message with which a request went on."""
        return self.last(Generate, request_id)
