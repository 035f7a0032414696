"""Which raw body goes to which tokenizer worker, and when. Pure: events in, assignments out.

A worker has one *exclusive* body in flight, or several short ones: a short body never waits behind a running
long one while another worker can take it. Long bodies are exclusive, and so are suspects, whose last worker
died. Some workers take none of them (``TokenizerConfig.takes_long``). An exclusive body that has waited long
enough, and longer than every short one, goes first: the other workers are kept free for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tokservice.runtime.config import TokenizerConfig

Assignment = tuple[str, int]  # (request_id, attempt)

DEADLINE_BASE_S = 10.0
WORST_BYTES_PER_S = 300_000  # measured worst case: 10 MB of base64 in 17 s, halved for a busy machine


@dataclass(slots=True)
class Waiting:
    """A body in a queue."""

    request_id: str
    num_bytes: int
    exclusive: bool
    since_s: float


@dataclass(slots=True)
class _InFlight:
    num_bytes: int
    exclusive: bool
    assigned_s: float


@dataclass(slots=True)
class _Worker:
    identity: str
    capacity: int
    takes_exclusive: bool
    stalled: bool = False  # missed a deadline and has not answered since
    in_flight: dict[Assignment, _InFlight] = field(default_factory=dict)  # in the order of its inbox

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.in_flight.values())

    @property
    def can_take_short(self) -> bool:
        if self.stalled or len(self.in_flight) >= self.capacity:
            return False
        return not any(item.exclusive for item in self.in_flight.values())

    @property
    def can_take_exclusive(self) -> bool:
        return self.takes_exclusive and not self.stalled and not self.in_flight


class TokenizerPool:
    """The living workers, what each has in flight, and the bodies that wait."""

    def __init__(self, workers: TokenizerConfig, long_body_bytes: int, exclusive_wait_s: float) -> None:
        self._configured = workers
        self._long_body_bytes = long_body_bytes
        self._exclusive_wait_s = exclusive_wait_s
        self._workers: dict[str, _Worker] = {}
        self._short: deque[Waiting] = deque()
        self._exclusive: deque[Waiting] = deque()

    @property
    def num_waiting(self) -> int:
        """Bodies that wait for a worker."""
        return len(self._short) + len(self._exclusive)

    @property
    def num_in_flight(self) -> int:
        """Bodies at workers."""
        return sum(len(worker.in_flight) for worker in self._workers.values())

    def add_worker(self, identity: str, slot: int, capacity: int) -> None:
        """A worker is ready."""
        self._workers.setdefault(identity, _Worker(identity, capacity, self._configured.takes_long(slot)))

    def remove_worker(self, identity: str) -> list[Assignment]:
        """A worker is dead. Returns what it had, the one that it was working on first."""
        worker = self._workers.pop(identity, None)
        return list(worker.in_flight) if worker else []

    def enqueue(self, request_id: str, num_bytes: int, now_s: float, *, is_suspect: bool) -> None:
        """A body is complete, or must be tried again."""
        exclusive = is_suspect or num_bytes > self._long_body_bytes
        body = Waiting(request_id, num_bytes, exclusive, now_s)
        (self._exclusive if exclusive else self._short).append(body)

    def withdraw(self, request_id: str) -> None:
        """A queued body is no longer wanted."""
        for queue in (self._short, self._exclusive):
            for body in queue:
                if body.request_id == request_id:
                    queue.remove(body)
                    return

    def release(self, identity: str, assignment: Assignment) -> None:
        """A worker answered: its place is free."""
        worker = self._workers.get(identity)
        if worker is not None:
            worker.in_flight.pop(assignment, None)
            worker.stalled = False

    def assign(self, now_s: float) -> Iterator[tuple[Waiting, str]]:
        """Take bodies off the queues, each with its worker; the caller ``confirm``s each with its attempt."""
        while self._short or self._exclusive:
            overdue = self._exclusive_is_overdue(now_s)
            worker = None if overdue else self._worker_for_short(kept_free=False)
            if self._short and worker is not None:
                yield self._short.popleft(), worker.identity
                continue
            worker = next((worker for worker in self._workers.values() if worker.can_take_exclusive), None)
            if self._exclusive and worker is not None:
                yield self._exclusive.popleft(), worker.identity
                continue
            worker = self._worker_for_short(kept_free=True) if overdue else None
            if self._short and worker is not None:
                yield self._short.popleft(), worker.identity
                continue
            return

    def confirm(self, identity: str, assignment: Assignment, body: Waiting, now_s: float) -> None:
        """The body was sent."""
        self._workers[identity].in_flight[assignment] = _InFlight(body.num_bytes, body.exclusive, now_s)

    def expire_queued(self, before_s: float) -> list[str]:
        """Remove the bodies that were queued before a time; their request ids."""
        expired = []
        for queue in (self._short, self._exclusive):
            while queue and queue[0].since_s < before_s:
                expired.append(queue.popleft().request_id)
        return expired

    def expire_stalled(self, now_s: float) -> list[tuple[str, list[Assignment]]]:
        """Take everything from workers that missed their deadline, until they answer again.

        Returns what each of them had, the one that it was working on first.
        """
        stalled: list[tuple[str, list[Assignment]]] = []
        for worker in self._workers.values():
            if not worker.in_flight:
                continue
            oldest = next(iter(worker.in_flight.values()))
            if now_s - oldest.assigned_s > DEADLINE_BASE_S + worker.num_bytes / WORST_BYTES_PER_S:
                worker.stalled = True
                stalled.append((worker.identity, list(worker.in_flight)))
                worker.in_flight.clear()
        return stalled

    def _exclusive_is_overdue(self, now_s: float) -> bool:
        if not self._exclusive:
            return False
        since_s = self._exclusive[0].since_s
        # Older than every short one: else a single worker that has many long ones to do would do nothing else.
        oldest = not self._short or since_s <= self._short[0].since_s
        return oldest and now_s - since_s >= self._exclusive_wait_s

    def _worker_for_short(self, *, kept_free: bool) -> _Worker | None:
        free = [
            worker
            for worker in self._workers.values()
            if worker.can_take_short and not (kept_free and worker.takes_exclusive)
        ]
        return min(free, key=lambda worker: (worker.num_bytes, worker.takes_exclusive), default=None)
