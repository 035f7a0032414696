"""The scheduler under random histories: accounting, ends, fairness. No tensors."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from engine.core import EngineRequest
from engine.torch_core import scheduler as scheduler_module
from engine.torch_core.batch import build_batch
from engine.torch_core.kv_cache import BlockPool
from engine.torch_core.request import Sequence, Status, sequences_of
from engine.torch_core.scheduler import Chunk, Scheduler
from tokservice.wire.messages import FinishReason, SamplingParams

VOCAB_SIZE = 4  # few ids, so that prefixes are often equal
MAX_MODEL_LEN = 40


def next_token(content: list[int], arrival: int) -> int:
    """A stand-in for the model and the sampler: depends on every token before, and on a seed."""
    return hash((*content, arrival)) % VOCAB_SIZE


class History:
    """Random arrivals, aborts and memory pressure against one scheduler, with a model of what blocks contain.

    Overlapped, a step is scheduled before the tokens of the step before are known.
    """

    def __init__(self, seed: int, overlaps: bool) -> None:
        self.rng = rng = random.Random(seed)
        self.overlaps = overlaps
        self.in_flight: list[Sequence] = []
        self.block_size = rng.choice([1, 2, 4, 8])
        num_blocks = -(-MAX_MODEL_LEN // self.block_size) + rng.randrange(12)
        self.pool = BlockPool(num_blocks, self.block_size)
        self.scheduler = Scheduler(self.pool, rng.choice([1, 3, 8, 64]), rng.choice([1, 2, 5, 16]), rng.random() < 0.8)
        self.alive: list[Sequence] = []
        self.ends: Counter[Sequence] = Counter()
        self.output: dict[Sequence, list[int]] = {}  # tokens sampled, known to the scheduler or not
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, place) -> all tokens up to there
        self.num_added = 0

    def add(self) -> None:
        rng = self.rng
        n = rng.choice([1, 1, 1, 3])
        prompt = np.array([rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 30))], np.uint32)
        sampling = SamplingParams(
            n=n,
            max_tokens=rng.randrange(1, 20),
            priority=rng.choice([0, 0, 0, 1, -1]),
            stop_token_ids=rng.choice([(), (2,)]),
        )
        request = EngineRequest(f"r{self.num_added}", 1, sampling, (prompt,))
        for sequence in sequences_of(request, MAX_MODEL_LEN, (), self.num_added):
            self.num_added += 1
            self.alive.append(sequence)
            self.output[sequence] = []
            self.scheduler.add(sequence)

    def abort(self) -> None:
        if self.alive:
            self.end(self.rng.choice(self.alive))

    def end(self, sequence: Sequence) -> None:
        self.scheduler.finish([sequence])
        self.alive.remove(sequence)
        self.ends[sequence] += 1
        output = self.output.pop(sequence)
        known = sequence.output_ids.tolist()[: sequence.num_known_tokens - sequence.num_prompt_tokens]
        assert known == output[: len(known)]
        assert len(output) - len(known) in ((0, 1) if self.overlaps else (0,))
        content = sequence.tokens[: sequence.num_prompt_tokens].tolist()
        for token in output:
            assert token == next_token(content, sequence.arrival), "preemption or sharing changed the ids"
            content.append(token)

    def content_of(self, sequence: Sequence) -> list[int]:
        return sequence.tokens[: sequence.num_prompt_tokens].tolist() + self.output[sequence]  # type: ignore[no-any-return]

    def step(self) -> bool:
        chunks = self.scheduler.schedule()
        assert sum(chunk.num_tokens for chunk in chunks) <= self.scheduler.token_budget
        assert len({chunk.sequence for chunk in chunks}) == len(chunks)
        assert len(self.scheduler.running) <= self.scheduler.max_running
        assert not any(chunk.sequence.awaits_its_end for chunk in chunks)
        self.write(chunks)
        candidates = [chunk.sequence for chunk in chunks if chunk.samples]
        self.scheduler.commit(chunks)
        received = self.receive()
        self.in_flight = [sequence for sequence in candidates if sequence.status is not Status.FINISHED]
        for row, sequence in enumerate(self.in_flight):
            self.output[sequence].append(next_token(self.read(sequence), sequence.arrival))
            sequence.expect(row)
        if not self.overlaps:
            self.receive()
        self.check()
        return bool(chunks or received)

    def receive(self) -> int:
        step, self.in_flight = self.in_flight, []
        for sequence in step:
            if sequence.status is not Status.FINISHED:
                sequence.arrive(self.output[sequence][-1])
                if sequence.ending() is not FinishReason.RUNNING:
                    self.end(sequence)
        return len(step)

    def write(self, chunks: list[Chunk]) -> None:
        """What a model would, from the very rows that it gets."""
        if not chunks:
            return
        batch = build_batch(chunks, self.block_size, 4)
        for chunk, rows in zip(chunks, batch.row_of, strict=True):
            assert chunk.sequence.status is Status.RUNNING
            assert batch.positions[rows].tolist() == list(range(chunk.start, chunk.end))
            content = self.content_of(chunk.sequence)
            for position, row in zip(range(chunk.start, chunk.end), rows.tolist(), strict=True):
                token = int(batch.token_ids[row])
                if token < 0:
                    token = self.output[self.in_flight[-1 - token]][-1]
                key = (int(batch.write_blocks[row]), int(batch.write_offsets[row]))
                self.content[key] = (*content[:position], token)

    def read(self, sequence: Sequence) -> list[int]:
        content = self.content_of(sequence)
        for position in range(sequence.num_tokens):
            block = sequence.block_table[position // self.block_size]
            found = self.content[block, position % self.block_size]
            assert found == tuple(content[: position + 1]), "a block holds another's tokens"
        return content

    def check(self) -> None:
        held = Counter(block for sequence in self.alive for block in sequence.block_table)
        assert self.pool.num_used == len(held)
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks
        assert all(self.pool._references[block] == held[block] for block in range(self.pool.num_blocks))
        assert all(not s.block_table for s in self.alive if s.status is Status.WAITING)

    def run(self) -> None:
        for _ in range(self.rng.randrange(5, 40)):
            action = self.rng.random()
            if action < 0.3:
                self.add()
            elif action < 0.36:
                self.abort()
            else:
                self.step()
        for _ in range(5000):
            if not self.alive:
                break
            assert self.step(), "something waits, and nothing runs"
        assert not self.alive, "a sequence starved"
        assert len(self.ends) == self.num_added
        assert set(self.ends.values()) <= {1}
        assert self.pool.num_used == 0
        assert not self.output
        assert self.scheduler.num_waiting == 0
        assert not self.scheduler._leaders


@pytest.mark.parametrize("overlaps", [False, True])
def test_random_histories(overlaps: bool) -> None:
    for seed in range(400):
        History(seed, overlaps).run()


def test_what_is_preempted_before_its_last_token_is_read_is_not_computed_anew() -> None:
    """A random history in which there was room to begin it again at once."""
    History(5_000_028, overlaps=True).run()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("overlaps", [False, True])
def test_ten_thousand_random_histories(overlaps: bool) -> None:
    for seed in range(10_000):
        History(1_000_000 + seed, overlaps).run()


def make(num_blocks: int, budget: int, seqs: int = 8) -> Scheduler:
    return Scheduler(BlockPool(num_blocks, 4), budget, seqs, True)


def sequence(name: str, length: int, arrival: int, **sampling: int) -> Sequence:
    prompt = np.arange(length, dtype=np.uint32) + 1000 * arrival
    request = EngineRequest(name, 1, SamplingParams(**sampling), (prompt,))  # type: ignore[arg-type]
    (one,) = sequences_of(request, 1000, (), arrival)
    return one


def advance(scheduler: Scheduler) -> dict[str, int]:
    """One step; tokens computed by request."""
    chunks = scheduler.schedule()
    scheduler.commit(chunks)
    for chunk in chunks:
        if chunk.sequence.num_uncomputed_tokens == 0:
            chunk.sequence.append(0)
    return {chunk.sequence.request_id: chunk.num_tokens for chunk in chunks}


def test_a_long_prompt_never_stops_running_decodes() -> None:
    """A prompt that is prefilled in one go stalls every stream for as long as it takes."""
    scheduler = make(1000, 16)
    scheduler.add(sequence("short", 3, 0, max_tokens=500))
    advance(scheduler)
    scheduler.add(sequence("long", 400, 1))
    for _ in range(26):
        assert advance(scheduler) == {"short": 1, "long": 15}


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one() -> None:
    """Behind a prompt of 8,000 tokens one of 30 waited for twelve seconds."""
    scheduler = make(1000, 16)
    scheduler.add(sequence("long", 400, 0))
    assert advance(scheduler) == {"long": 16}
    for arrival, (name, length) in enumerate([("as long", 300), ("short", 6), ("medium", 100)], 1):
        scheduler.add(sequence(name, length, arrival))
    assert advance(scheduler) == {"long": 8, "short": 6, "medium": 2}
    assert advance(scheduler) == {"short": 1, "long": 8, "medium": 7}
    scheduler.add(sequence("shorter", 3, 4))
    assert advance(scheduler) == {"short": 1, "long": 8, "medium": 4, "shorter": 3}


def test_a_step_looks_at_few_prompts_that_are_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands that waited beside a long one, each step took 14 ms to look at all."""
    monkeypatch.setattr(scheduler_module, "MAX_TOO_LONG", 2)
    scheduler = make(1000, 16)
    scheduler.add(sequence("long", 400, 0))
    assert advance(scheduler) == {"long": 16}
    for arrival, (name, length) in enumerate([("short", 6), ("long too", 300), ("and this", 300), ("late", 3)], 1):
        scheduler.add(sequence(name, length, arrival))
    assert advance(scheduler) == {"long": 10, "short": 6}


def test_a_long_prompt_goes_on_beside_any_number_of_short_ones() -> None:
    scheduler = make(1000, 16)
    scheduler.add(sequence("long", 400, 0))
    for arrival in range(1, 40):
        scheduler.add(sequence("short", 30, arrival))
        assert advance(scheduler)["long"] >= 8
        scheduler.finish([one for one in scheduler.running if one.num_output_tokens])


def test_a_long_prompt_leaves_nothing_to_those_of_lower_priority() -> None:
    """Short prompts from the background took half of each step of an urgent long one."""
    scheduler = make(1000, 16)
    scheduler.add(sequence("begun", 100, 0, priority=5))
    assert advance(scheduler) == {"begun": 16}
    scheduler.add(sequence("urgent", 30, 1))
    scheduler.add(sequence("background", 6, 2, priority=5))
    assert advance(scheduler) == {"begun": 8, "urgent": 8}
    assert advance(scheduler) == {"urgent": 16}
    scheduler.add(sequence("as urgent", 2, 3))
    assert advance(scheduler) == {"urgent": 6, "begun": 5, "background": 3, "as urgent": 2}


def test_priority_then_arrival() -> None:
    scheduler = make(100, 8, seqs=1)
    for arrival, (name, priority) in enumerate([("a", 0), ("b", 0), ("urgent", -5)]):
        scheduler.add(sequence(name, 4, arrival, priority=priority))
    assert list(advance(scheduler)) == ["urgent"]


def test_the_last_in_order_is_preempted_and_comes_back_first() -> None:
    scheduler = make(8, 64)
    first, second = sequence("first", 15, 0), sequence("second", 15, 1)
    late = sequence("late", 15, 2)
    for one in (first, second, late):
        scheduler.add(one)
    assert set(advance(scheduler)) == {"first", "second"}
    assert set(advance(scheduler)) == {"first", "second"}
    assert set(advance(scheduler)) == {"first"}  # needs a fifth block
    assert second.status is Status.WAITING
    assert scheduler.num_preemptions == 1
    scheduler.finish([first])
    assert next(iter(advance(scheduler))) == "second"


def test_nobody_overtakes_a_long_prompt_that_waits_for_blocks() -> None:
    """Small requests that slip past a large one for ever starve it."""
    scheduler = make(10, 64)
    running = sequence("running", 30, 0)
    scheduler.add(running)
    advance(scheduler)
    scheduler.add(sequence("large", 30, 1))
    scheduler.add(sequence("small", 4, 2))
    assert set(advance(scheduler)) == {"running"}
    scheduler.finish([running])
    assert list(advance(scheduler)) == ["large", "small"]


def test_copies_compute_their_prompt_once() -> None:
    scheduler = make(100, 64)
    prompt = np.arange(41, dtype=np.uint32)
    request = EngineRequest("r", 1, SamplingParams(n=4), (prompt,))
    for one in sequences_of(request, 1000, (), 0):
        scheduler.add(one)
    chunks = scheduler.schedule()
    assert [chunk.num_tokens for chunk in chunks] == [41]
    scheduler.commit(chunks)
    chunks[0].sequence.append(0)
    assert sorted(chunk.num_tokens for chunk in scheduler.schedule()) == [1, 1, 1, 1]
    assert scheduler.pool.num_used == 10 + 4


def test_prefix_cache_survives_its_owner_until_blocks_are_needed() -> None:
    scheduler = make(12, 64)
    owner = sequence("owner", 33, 0)
    scheduler.add(owner)
    advance(scheduler)
    scheduler.finish([owner])
    again = sequence("again", 33, 0)
    scheduler.add(again)
    assert advance(scheduler) == {"again": 1}
    assert again.num_cached_tokens == 32
    scheduler.finish([again])
    other = sequence("other", 44, 1)
    scheduler.add(other)
    advance(scheduler)
    scheduler.finish([other])
    last = sequence("last", 33, 0)
    scheduler.add(last)
    assert advance(scheduler)["last"] > 1


def test_blocks_of_overlapping_steps_are_published_once_their_tokens_are_known() -> None:
    """A block that a token completes while it is still unknown must neither be hashed so nor be forgotten."""
    scheduler = make(100, 64)
    first = sequence("first", 3, 0, max_tokens=16)
    scheduler.add(first)
    for token in range(16):
        scheduler.commit(scheduler.schedule())
        if first.pending_row >= 0:
            first.arrive(token)
        first.expect(0)
    assert scheduler.schedule() == []
    first.arrive(16)
    scheduler.finish([first])
    again = sequence("again", 17, 1)
    again.tokens[:17] = first.tokens[:17]
    scheduler.add(again)
    assert advance(scheduler) == {"again": 1}
