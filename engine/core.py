"""The engine's interface: add requests, step, take tokens. No sockets, no threads, no clock.

``engine_proc.py`` drives any object of this shape; ``simulated.py`` and ``torch_core`` implement it. Not
thread-safe: one thread calls everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokservice.wire.messages import ALL_CHOICES, EngineLimits, FinishReason, SamplingParams

TokenIds = npt.NDArray[np.uint32]  # shape (num_tokens,)


class RequestRefused(ValueError):
    """``add`` refused a request before any tensor was touched; the message says why."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """All choices of one request. Choice ``i * sampling.n + j`` is the j-th completion of prompt i."""

    request_id: str
    attempt: int
    sampling: SamplingParams
    prompts: tuple[TokenIds, ...]  # each at least one token
    # Where the request continues an earlier attempt, per choice: the output so far, and how it ended there.
    output_ids: tuple[TokenIds, ...] = ()
    finished: tuple[FinishReason, ...] = ()

    @property
    def num_choices(self) -> int:
        """Prompts times choices per prompt."""
        return len(self.prompts) * self.sampling.n


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of the tokens of one output, a row per token: the sampled token first, then the most likely ones."""

    token_ids: npt.NDArray[np.uint32]  # (num_tokens, 1 + num_top)
    logprobs: npt.NDArray[np.float32]  # the same shape; natural logarithms before temperature


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """What one step made of one choice. A choice ends with exactly one output that has a finish reason."""

    request_id: str
    attempt: int
    choice: int
    token_ids: tuple[int, ...]  # new output tokens; a STOP's last one is the eos or stop token
    finish_reason: FinishReason = FinishReason.RUNNING
    logprobs: Logprobs | None = None
    num_cached_tokens: int = 0  # on a choice's first output: prompt tokens found in the prefix cache
    prompt_logprobs: Logprobs | None = None  # on a first output, where asked for: of prompt tokens 1, 2, ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and running totals, read between steps."""

    num_running: int = 0  # choices that hold KV cache
    num_waiting: int = 0  # choices that wait for it
    kv_cache_used_tokens: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # prefilled since the start
    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache


class EngineCore(Protocol):
    """Continuous batching over a KV cache: requests join and leave between steps."""

    @property
    def limits(self) -> EngineLimits:
        """Constant for the life of the engine."""

    @property
    def stats(self) -> EngineStats:
        """A snapshot."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request. A higher attempt of a known one replaces it without a word about the old one.

        Choices whose ``finished`` is not RUNNING are not run and give no output. Raises RequestRefused. Of a guide
        that cannot be used, the engine may learn only later: then every choice ends with GUIDE_FAILED.
        """

    def abort(self, request_id: str, choice: int = ALL_CHOICES) -> None:
        """End a choice, or all, at once: the next ``step`` returns its ABORT output. Unknown ids do nothing."""

    def has_work(self) -> bool:
        """Whether ``step`` would return or compute anything."""

    def step(self) -> list[ChoiceOutput]:
        """One forward pass, at most: every running choice moves by its share of the token budget."""
