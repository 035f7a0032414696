"""What the next step computes: one token budget, shared by decode and chunked prefill.

Engine process; pure: no torch, no clock. Priorities first, then order of arrival. Every running decode gets its
token in every step; what is left of the budget goes to prefills, in chunks, so that a long prompt delays the
running streams by one step's budget at most. Short prompts do not wait for its end either: of the room that it
cannot do with it leaves a half to those that need at most half as many steps, if their priority is no lower. When
blocks run out, the last in order is preempted: it lets go of its blocks and is computed anew later (much of it found in
the prefix cache, if nobody took it). A waiting sequence is admitted only if all its present tokens fit, and while it
waits for blocks nobody overtakes it within its priority.

A step may be scheduled while the tokens of the last one are still being sampled (``Sequence.expect``): their number
is known, and that is all it takes. Only a block's hash needs the ids, so such a block is published a step later.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine.torch_core.kv_cache import BlockPool, extend_hashes
from engine.torch_core.request import Sequence, Status


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start .. start+num_tokens-1 of a sequence, to compute in this step."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        """Tokens of the sequence that are computed after the step."""
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether the step ends with a new token for the sequence."""
        return self.end == self.sequence.num_tokens


MAX_TOO_LONG = 64  # waiting prompts that a step looks at in vain: thousands of long ones would take it too much time


class Scheduler:
    """Holds every unfinished sequence. One step is ``schedule``, computing, ``commit``, then appends and ``finish``.

    Where steps overlap, the appends and ends of a step come after the ``commit`` of the next one.
    """

    def __init__(self, pool: BlockPool, max_num_batched_tokens: int, max_num_seqs: int, prefix_caching: bool) -> None:
        self.pool = pool
        self.token_budget = max_num_batched_tokens
        self.max_running = min(max_num_seqs, max_num_batched_tokens)  # so that no decode ever misses a step
        self.prefix_caching = prefix_caching
        self.running: list[Sequence] = []  # in order
        self.num_preemptions = 0
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []  # heap
        self._leaders: dict[tuple[str, int, int], Sequence] = {}  # of n copies, the one that computes the prompt

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no blocks."""
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; its blocks for all its tokens must fit the pool."""
        if sequence.sampling.n > 1:
            self._leaders.setdefault(_prompt_key(sequence), sequence)
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def finish(self, sequences: Iterable[Sequence]) -> None:
        """End sequences, wherever they are, and free what they hold."""
        waiting = running = False
        for sequence in sequences:
            waiting |= sequence.status is Status.WAITING
            running |= sequence.status is Status.RUNNING
            self._free(sequence)
            sequence.status = Status.FINISHED
            self._forget_leader(sequence)
        if running:
            self.running = [sequence for sequence in self.running if sequence.status is Status.RUNNING]
        if waiting:
            self._waiting = [entry for entry in self._waiting if entry[1].status is Status.WAITING]
            heapq.heapify(self._waiting)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, decodes first; blocks for them are held when it returns."""
        going_on = [sequence for sequence in self.running if not sequence.awaits_its_end]
        decodes = [one for one in going_on if one.num_uncomputed_tokens == 1]
        still_running = (one for one in decodes if one.status is Status.RUNNING and self._hold_block(one))
        chunks = [Chunk(one, one.num_computed_tokens, 1) for one in still_running]
        prefills = [one for one in going_on if one.num_uncomputed_tokens > 1 and one.status is Status.RUNNING]
        return chunks + self._prefill(prefills, self.token_budget - len(chunks), math.inf, math.inf)

    def commit(self, chunks: Iterable[Chunk]) -> None:
        """Keys and values of the chunks are in their blocks, or will be before any later step reads them.

        Full blocks of known tokens can be found from now on.
        """
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed_tokens = chunk.end
            full = min(chunk.end, sequence.num_known_tokens) // self.pool.block_size
            # The token before the chunk may have been unknown when it was computed.
            for index in range(max(chunk.start - 1, 0) // self.pool.block_size, full):
                self._extend_hashes(sequence, full)
                self.pool.publish(sequence.block_table[index], sequence.block_hashes[index])
            if chunk.end >= sequence.num_prompt_tokens:
                self._forget_leader(sequence)

    def _prefill(self, running: list[Sequence], budget: int, max_new: float, last: float) -> list[Chunk]:
        """Chunks of running prefills, in order, and of those that begin with at most ``max_new`` tokens to compute.

        ``last``: the lowest priority, which is the greatest number, that takes part.
        """
        if not budget:
            return []
        if not running or running[0].order[0] > last:
            return self._admit(budget, max_new, last)
        first, *others = running
        num_tokens = first.num_uncomputed_tokens
        if num_tokens <= budget:
            chunks = self._prefill(others, budget - num_tokens, max_new, last)
        else:
            chunks = self._prefill(others, budget // 2, min(max_new, num_tokens // 2), first.order[0])
            num_tokens = budget - sum(chunk.num_tokens for chunk in chunks)
        return [Chunk(first, first.num_computed_tokens, num_tokens), *chunks]

    def _admit(self, budget: int, max_new: float, last: float) -> list[Chunk]:
        """First chunks of waiting sequences, in order, but for those that have more tokens to compute."""
        chunks: list[Chunk] = []
        held_back: list[tuple[tuple[int, int], Sequence]] = []
        num_too_long = 0
        while self._waiting and self._waiting[0][0][0] <= last and budget and len(self.running) < self.max_running:
            entry = heapq.heappop(self._waiting)
            sequence = entry[1]
            if self._leaders.get(_prompt_key(sequence), sequence) is not sequence:
                held_back.append(entry)  # soon it finds the prompt's blocks computed
                continue
            if sequence.awaits_its_end:  # it was preempted meanwhile
                held_back.append(entry)
                continue
            shared = self._find_shared(sequence)
            if sequence.num_tokens - len(shared) * self.pool.block_size > max_new:
                held_back.append(entry)
                num_too_long += 1
                if num_too_long == MAX_TOO_LONG:
                    break
                continue
            if not self._start(sequence, shared):
                held_back.append(entry)
                break
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            budget -= num_tokens
            chunks.append(Chunk(sequence, sequence.num_computed_tokens, num_tokens))
        for entry in held_back:
            heapq.heappush(self._waiting, entry)
        self.running.sort(key=lambda sequence: sequence.order)
        return chunks

    def _find_shared(self, sequence: Sequence) -> list[int]:
        """Known blocks with the beginning of a waiting sequence."""
        if sequence.wants_prompt_logprobs:
            return []
        # At least one token is left to compute: sampling needs its logits.
        usable = (sequence.num_tokens - 1) // self.pool.block_size
        self._extend_hashes(sequence, usable)
        return self.pool.find(sequence.block_hashes[:usable])

    def _start(self, sequence: Sequence, shared: list[int]) -> bool:
        """Give a waiting sequence the blocks of all its tokens, shared ones first; False if they are not free."""
        missing = self.pool.blocks_for(sequence.num_tokens) - len(shared)
        if missing + self.pool.num_free_among(shared) > self.pool.num_free:
            return False
        self.pool.share(shared)
        sequence.block_table = shared + self.pool.allocate(missing)
        sequence.num_computed_tokens = len(shared) * self.pool.block_size
        sequence.status = Status.RUNNING
        if not sequence.was_scheduled:
            sequence.was_scheduled = True
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        self.running.append(sequence)
        return True

    def _hold_block(self, sequence: Sequence) -> bool:
        """Make room for a decode's token, preempting the last in order; False if that was the sequence itself.

        A prefill holds the blocks of all its tokens from its beginning on.
        """
        if sequence.num_computed_tokens < len(sequence.block_table) * self.pool.block_size:
            return True
        while not self.pool.num_free:
            victim = self.running.pop()
            self._free(victim)
            victim.status = Status.WAITING
            heapq.heappush(self._waiting, (victim.order, victim))
            self.num_preemptions += 1
            if victim is sequence:
                return False
        sequence.block_table += self.pool.allocate(1)
        return True

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        # Without prefix caching the copies of one request still share their prompt.
        salt = b"" if self.prefix_caching else f"{sequence.request_id}/{sequence.attempt}".encode()
        extend_hashes(sequence.block_hashes, sequence.tokens, num_blocks, self.pool.block_size, salt)

    def _forget_leader(self, sequence: Sequence) -> None:
        if self._leaders and self._leaders.get(_prompt_key(sequence)) is sequence:
            del self._leaders[_prompt_key(sequence)]


def _prompt_key(sequence: Sequence) -> tuple[str, int, int]:
    return (sequence.request_id, sequence.attempt, sequence.choice - sequence.copy)
