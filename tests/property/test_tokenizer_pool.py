"""Dispatch of raw bodies: what its docstring promises, under any order of arrivals, answers and deaths."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokservice.router.tokenizer_pool import (
    DEADLINE_BASE_S,
    WORST_BYTES_PER_S,
    Assignment,
    TokenizerPool,
    Waiting,
)
from tokservice.runtime.config import TokenizerConfig

LONG_BODY_BYTES = 65_536
EXCLUSIVE_WAIT_S = 2.0
CAPACITY = 3


class Pool(RuleBasedStateMachine):
    """The pool beside a plain model: what waits, and what each worker has."""

    @initialize(num_configured=st.integers(1, 4))
    def begin(self, num_configured: int) -> None:
        self.num_configured = num_configured
        self.pool = TokenizerPool(TokenizerConfig(workers=num_configured), LONG_BODY_BYTES, EXCLUSIVE_WAIT_S)
        self.now = 0.0
        self.count = 0
        self.waiting: list[Waiting] = []
        self.workers: dict[str, dict[Assignment, Waiting]] = {}
        self.slots: dict[str, int] = {}
        self.stalled: set[str] = set()
        for slot in range(num_configured):
            self._add(slot)

    @rule(is_suspect=st.booleans(), num_bytes=st.integers(0, 1000) | st.integers(0, 1_000_000))
    def enqueue(self, is_suspect: bool, num_bytes: int) -> None:
        self.count += 1
        body = Waiting(str(self.count), num_bytes, is_suspect or num_bytes > LONG_BODY_BYTES, self.now)
        self.waiting.append(body)
        self.pool.enqueue(body.request_id, num_bytes, self.now, is_suspect=is_suspect)
        self._assign()

    @rule(seconds=st.sampled_from((0.1, 1.0, 3.0, 30.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self._assign()

    @precondition(lambda self: any(self.workers.values()))
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        """Mostly the first, as a worker does; any, where it was told to drop one."""
        identity = data.draw(st.sampled_from([name for name, bodies in self.workers.items() if bodies]))
        assignment = data.draw(st.sampled_from(list(self.workers[identity])))
        del self.workers[identity][assignment]
        self.stalled.discard(identity)
        self.pool.release(identity, assignment)
        self._assign()

    @rule(identity=st.sampled_from(("tokenizer.0.1", "tokenizer.9.9")))
    def answer_nobody_waits_for(self, identity: str) -> None:
        self.pool.release(identity, ("unknown", 1))
        self.stalled.discard(identity)
        self._assign()

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def worker_dies_and_is_replaced(self, data: st.DataObject) -> None:
        identity = data.draw(st.sampled_from(sorted(self.workers)))
        bodies = self.workers.pop(identity)
        assert self.pool.remove_worker(identity) == list(bodies)  # in the order of its inbox
        assert self.pool.remove_worker(identity) == []
        self.stalled.discard(identity)
        self._add(self.slots[identity])
        self._assign()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        body = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(body)
        self.pool.withdraw(body.request_id)
        self.pool.withdraw(body.request_id)
        self._assign()

    @rule(age_s=st.sampled_from((5.0, 60.0)))
    def queue_times_out(self, age_s: float) -> None:
        old = {body.request_id for body in self.waiting if body.since_s < self.now - age_s}
        assert set(self.pool.expire_queued(self.now - age_s)) == old
        self.waiting = [body for body in self.waiting if body.request_id not in old]
        self._assign()

    @rule()
    def deadlines_pass(self) -> None:
        expected = {}
        for identity, bodies in self.workers.items():
            assigned = list(bodies)
            if assigned:
                limit_s = DEADLINE_BASE_S + sum(body.num_bytes for body in bodies.values()) / WORST_BYTES_PER_S
                if self.now - self.assigned_s[assigned[0]] > limit_s:
                    expected[identity] = assigned
        assert dict(self.pool.expire_stalled(self.now)) == expected
        for identity in expected:
            self.workers[identity].clear()
            self.stalled.add(identity)
        self._assign()

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.num_waiting == len(self.waiting)
        assert self.pool.num_in_flight == sum(map(len, self.workers.values()))

    @invariant()
    def workers_hold_one_exclusive_body_or_some_short_ones(self) -> None:
        for identity, bodies in getattr(self, "workers", {}).items():
            exclusive = [body for body in bodies.values() if body.exclusive]
            assert len(bodies) <= (1 if exclusive else CAPACITY)
            if exclusive and self.num_configured > 1:
                assert self.slots[identity] != 0

    @invariant()
    def nothing_waits_that_could_run(self) -> None:
        """What is left in the queues after an assignment has no place; but an overdue exclusive body may have
        the workers kept free that take such bodies."""
        if not getattr(self, "workers", None):
            return
        short = [body for body in self.waiting if not body.exclusive]
        exclusive = [body for body in self.waiting if body.exclusive]
        if exclusive:
            assert not any(self._takes_exclusive(name) and not self.workers[name] for name in self._awake())
        if short:
            free = [name for name in self._awake() if self._has_place_for_short(name)]
            if not self._is_overdue(exclusive, short):
                assert not free
            else:
                assert not [name for name in free if not self._takes_exclusive(name)]

    # --- the model

    assigned_s: dict[Assignment, float]

    def _add(self, slot: int) -> None:
        self.count += 1
        identity = f"tokenizer.{slot}.{self.count}"
        self.workers[identity] = {}
        self.slots[identity] = slot
        self.pool.add_worker(identity, slot, CAPACITY)

    def _awake(self) -> list[str]:
        return [name for name in self.workers if name not in self.stalled]

    def _takes_exclusive(self, identity: str) -> bool:
        return self.num_configured == 1 or self.slots[identity] > 0

    def _has_place_for_short(self, identity: str) -> bool:
        bodies = self.workers[identity]
        return len(bodies) < CAPACITY and not any(body.exclusive for body in bodies.values())

    def _is_overdue(self, exclusive: list[Waiting], short: list[Waiting]) -> bool:
        if not exclusive or self.now - exclusive[0].since_s < EXCLUSIVE_WAIT_S:
            return False
        return not short or exclusive[0].since_s <= short[0].since_s

    def _assign(self) -> None:
        if not hasattr(self, "assigned_s"):
            self.assigned_s = {}
        for body, identity in self.pool.assign(self.now):
            bodies = self.workers[identity]
            short = [other for other in self.waiting if not other.exclusive]
            exclusive = [other for other in self.waiting if other.exclusive]
            assert identity not in self.stalled
            assert body == (exclusive if body.exclusive else short)[0]  # first come, first served, of each kind
            if body.exclusive:
                assert not bodies
                assert self._takes_exclusive(identity)
            else:
                assert self._has_place_for_short(identity)
                assert not (self._is_overdue(exclusive, short) and self._takes_exclusive(identity))
            self.count += 1
            assignment = (body.request_id, self.count)
            self.waiting.remove(body)
            bodies[assignment] = body
            self.assigned_s[assignment] = self.now
            self.pool.confirm(identity, assignment, body, self.now)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=60)


def _serve(pool: TokenizerPool, arrivals: dict[float, list[Waiting]], until_s: float) -> dict[str, float]:
    """Run the pool with workers that take 1 s for an exclusive body and 0.1 s for a short one; when each began."""
    began: dict[str, float] = {}
    due: list[tuple[float, str, Assignment]] = []
    for tenth in range(int(until_s * 10)):
        now = tenth / 10
        for done in [item for item in due if item[0] <= now]:
            due.remove(done)
            pool.release(*done[1:])
        for body in arrivals.get(now, ()):
            pool.enqueue(body.request_id, body.num_bytes, body.since_s, is_suspect=body.exclusive)
        for body, identity in pool.assign(now):
            assignment = (body.request_id, 1)
            pool.confirm(identity, assignment, body, now)
            began[body.request_id] = now
            due.append((now + (1.0 if body.exclusive else 0.1), identity, assignment))
    return began


def _flood(exclusive: bool, per_tenth: int, until_s: float) -> dict[float, list[Waiting]]:
    return {
        tenth / 10: [Waiting(f"{tenth}/{number}", 10, exclusive, tenth / 10) for number in range(per_tenth)]
        for tenth in range(int(until_s * 10))
    }


def _with(arrivals: dict[float, list[Waiting]], body: Waiting) -> dict[float, list[Waiting]]:
    arrivals[body.since_s] = [*arrivals.get(body.since_s, []), body]
    return arrivals


def _workers(num_configured: int) -> TokenizerPool:
    pool = TokenizerPool(TokenizerConfig(workers=num_configured), LONG_BODY_BYTES, EXCLUSIVE_WAIT_S)
    for slot in range(num_configured):
        pool.add_worker(f"tokenizer.{slot}.1", slot, CAPACITY)
    return pool


def test_an_exclusive_body_is_not_starved_by_short_ones() -> None:
    for num_configured in (1, 2, 3):
        # as many as the workers can do, so that none is ever idle
        arrivals = _with(_flood(False, CAPACITY * num_configured, 10), Waiting("long", 10, True, 1.0))
        began = _serve(_workers(num_configured), arrivals, 10)
        assert began["long"] <= 1.0 + EXCLUSIVE_WAIT_S + 0.2


def test_a_short_body_is_not_starved_by_exclusive_ones() -> None:
    """A single worker with a growing queue of overdue long bodies used to do nothing else."""
    arrivals = _with(_flood(True, 1, 4), Waiting("short", 10, False, 2.0))
    began = _serve(_workers(1), arrivals, 60)
    assert len(began) == 41
    later = [began[f"{tenth}/0"] for tenth in range(21, 40)]
    assert began["short"] < min(later)


def test_two_workers_serve_short_bodies_at_once_beside_any_number_of_long_ones() -> None:
    arrivals: Any = _flood(True, 3, 10)
    for tenth in range(0, 100, 3):
        arrivals = _with(arrivals, Waiting(f"short {tenth}", 10, False, tenth / 10))
    began = _serve(_workers(2), arrivals, 10)
    waits = [began[f"short {tenth}"] - tenth / 10 for tenth in range(0, 100, 3)]
    assert max(waits) <= 0.1
