"""One choice as the scheduler and the engine see it: its tokens, its progress, its blocks.

Engine process; pure: no torch, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from engine.core import EngineRequest, TokenIds
from tokservice.wire.messages import FinishReason, SamplingParams

UNKNOWN = np.uint32(2**32 - 1)  # stands for a token that is still being sampled; never a token id


class Status(IntEnum):
    """Where a sequence is. Preemption leads back from RUNNING to WAITING."""

    WAITING = 0
    RUNNING = 1  # holds KV cache blocks
    FINISHED = 2


@dataclass(slots=True, eq=False)  # a sequence is itself: compared and hashed by identity
class Sequence:
    """A choice and its state. Tokens 0 .. num_computed_tokens-1 have their keys and values in the blocks."""

    request_id: str
    attempt: int
    choice: int
    copy: int  # j of n: copies after the first wait for its prompt
    sampling: SamplingParams
    num_prompt_tokens: int
    max_tokens: int  # clipped to the context
    stop_ids: frozenset[int]  # stop tokens, and eos unless ignored
    arrival: int  # order of arrival over the engine's life; never changes
    tokens: TokenIds  # prompt, output so far, then room to grow
    num_tokens: int  # of those in use
    # Row of the step in flight that samples the last token, which nobody knows yet; -1: every token is known.
    pending_row: int = -1
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when first scheduled
    was_scheduled: bool = False
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks, as far as they were needed
    wants_prompt_logprobs: bool = False  # until they are complete, which needs every prompt token computed here
    first_output: bool = True  # nothing was returned yet in this attempt

    @property
    def order(self) -> tuple[int, int]:
        """Lower runs first, and is preempted last."""
        return (self.sampling.priority, self.arrival)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, those of earlier attempts included."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose keys and values are missing: 1 in decode, more in prefill."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose ids the host has."""
        return self.num_tokens - (self.pending_row >= 0)

    @property
    def awaits_its_end(self) -> bool:
        """Whether the token being sampled is its last one, whatever it is."""
        return self.pending_row >= 0 and self.num_output_tokens >= self.max_tokens

    @property
    def output_ids(self) -> TokenIds:
        """A view of the output tokens."""
        return self.tokens[self.num_prompt_tokens : self.num_tokens]

    def append(self, token: int | np.uint32) -> None:
        """Add an output token."""
        if self.num_tokens == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.zeros_like(self.tokens)])
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1

    def expect(self, row: int) -> None:
        """Add an output token that row ``row`` of the step in flight samples."""
        self.append(UNKNOWN)
        self.pending_row = row

    def arrive(self, token: int) -> None:
        """The expected token is known."""
        self.tokens[self.num_tokens - 1] = token
        self.pending_row = -1

    def ending(self) -> FinishReason:
        """How the choice has ended by its tokens, or RUNNING."""
        if self.num_output_tokens and int(self.tokens[self.num_tokens - 1]) in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_output_tokens >= self.max_tokens else FinishReason.RUNNING


def sequences_of(
    request: EngineRequest, max_model_len: int, eos_token_ids: tuple[int, ...], arrival: int
) -> list[Sequence]:
    """A sequence for each choice that has not ended in an earlier attempt; arrivals count up from ``arrival``."""
    sampling = request.sampling
    stop_ids = frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else eos_token_ids))
    sequences: list[Sequence] = []
    for choice in range(request.num_choices):
        if request.finished and request.finished[choice] is not FinishReason.RUNNING:
            continue
        prompt_index, copy = divmod(choice, sampling.n)
        prompt = request.prompts[prompt_index]
        output = request.output_ids[choice] if request.output_ids else prompt[:0]
        room = np.zeros(64, dtype=np.uint32)
        sequences.append(
            Sequence(
                request_id=request.request_id,
                attempt=request.attempt,
                choice=choice,
                copy=copy,
                sampling=sampling,
                num_prompt_tokens=len(prompt),
                max_tokens=min(sampling.max_tokens, max_model_len - len(prompt)),
                stop_ids=stop_ids,
                arrival=arrival + len(sequences),
                tokens=np.concatenate([prompt, output, room]).astype(np.uint32),
                num_tokens=len(prompt) + len(output),
                wants_prompt_logprobs=sampling.num_prompt_logprobs >= 0,
            )
        )
    return sequences
