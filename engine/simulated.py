"""An engine without a model: the interface of ``core.py``, ids by a fixed rule, time by configuration.

Engine process of kind "simulated", and most tests; no torch. It makes the front end testable and measurable: a
million tokens of context, any prefill rate and step time, at a cost per step that does not depend on the length
of prompts.

The rule. The output id at position p of a choice is ``low + mix(key, p) % (high - low)``, where [low, high) is
[vocab/8, vocab/2), which holds plain text and no special tokens in common vocabularies; the key is the CRC-32 of
the prompt's ids, with seed and choice mixed in unless the temperature is 0. A request can ask for ids of its own:
those that its logit_bias gives the value 100 are produced in turn, over and over (so that a test can produce any
bytes, or an eos). Stop tokens end a choice as in a real engine; before min_tokens the next id is taken instead.
"""

from __future__ import annotations

import heapq
import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine.checks import check_request
from engine.core import ChoiceOutput, EngineRequest, EngineStats, Logprobs, TokenIds
from tokservice.runtime.config import EngineConfig, SimulatedConfig
from tokservice.wire.messages import ALL_CHOICES, EngineLimits, FinishReason, SamplingParams

FORCED_BIAS = 100.0
TOKEN_BUDGET = 2048  # where the configuration leaves it to the engine
_MASK = 2**64 - 1


@dataclass(slots=True)
class _Choice:
    request_id: str
    attempt: int
    index: int
    sampling: SamplingParams
    key: int  # of the rule
    stop_ids: frozenset[int]
    forced_ids: tuple[int, ...]
    max_tokens: int  # clipped to the context
    num_prompt_tokens: int
    num_to_prefill: int
    num_output: int
    to_score: TokenIds | None  # the prompt, until its logprobs were given, where they are wanted
    alive: bool = True


@dataclass(slots=True)
class _Totals:
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class SimulatedEngine:
    """Implements EngineCore. ``step`` sleeps until the step's time is over: step_ms for all running choices
    together, and the prefilled tokens of this step at prefill_tokens_per_s (in chunks of the token budget)."""

    config: EngineConfig
    simulated: SimulatedConfig
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    max_model_len: int = 0  # 0: that of the simulated configuration
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _requests: dict[str, dict[int, _Choice]] = field(default_factory=dict)
    _waiting: list[tuple[int, int, _Choice]] = field(default_factory=list)  # heap; may hold dead choices
    _running: list[_Choice] = field(default_factory=list)
    _ended: list[ChoiceOutput] = field(default_factory=list)  # final outputs that the next step returns
    _num_added: int = 0
    _totals: _Totals = field(default_factory=_Totals)

    @property
    def limits(self) -> EngineLimits:
        """Constant; the KV cache counts as unlimited."""
        length = self.simulated.max_model_len
        length = min(length, self.max_model_len) if self.max_model_len else length
        max_num_seqs = self.config.max_num_seqs
        return EngineLimits(length, self.vocab_size, length * max_num_seqs, self.eos_token_ids, max_num_seqs)

    @property
    def stats(self) -> EngineStats:
        """A snapshot."""
        return EngineStats(
            num_running=len(self._running),
            num_waiting=sum(choice.alive for _, _, choice in self._waiting),
            kv_cache_used_tokens=sum(
                choice.num_prompt_tokens - choice.num_to_prefill + choice.num_output for choice in self._running
            ),
            num_prompt_tokens=self._totals.prompt_tokens,
            num_output_tokens=self._totals.output_tokens,
        )

    def add(self, request: EngineRequest) -> None:
        """See EngineCore."""
        check_request(request, self.limits)
        known = self._requests.get(request.request_id, {})
        if any(choice.attempt >= request.attempt for choice in known.values()):
            return
        self._forget(request.request_id)
        keys = [zlib.crc32(np.ascontiguousarray(prompt, dtype="<u4").data) for prompt in request.prompts]
        for index in range(request.num_choices):
            if not request.finished or request.finished[index] is FinishReason.RUNNING:
                self._add_choice(request, index, keys[index // request.sampling.n])

    def abort(self, request_id: str, choice: int = ALL_CHOICES) -> None:
        """See EngineCore."""
        choices = self._requests.get(request_id, {})
        for index in list(choices) if choice == ALL_CHOICES else [choice]:
            if index in choices:
                self._ended.append(self._end(choices[index], (), FinishReason.ABORT))
        self._running = [running for running in self._running if running.alive]

    def has_work(self) -> bool:
        """See EngineCore."""
        return bool(self._ended or self._running or self._waiting)

    def step(self) -> list[ChoiceOutput]:
        """See EngineCore. Sleeps."""
        start_s = self.clock()
        outputs, self._ended = self._ended, []
        while self._waiting and len(self._running) < self.config.max_num_seqs:
            choice = heapq.heappop(self._waiting)[2]
            if choice.alive:
                self._running.append(choice)
        if not self._running:
            return outputs
        rate = self.simulated.prefill_tokens_per_s
        budget = (self.config.max_num_batched_tokens or TOKEN_BUDGET) if rate else math.inf
        num_prefilled = 0
        for choice in self._running:
            chunk = int(min(choice.num_to_prefill, budget - num_prefilled))
            choice.num_to_prefill -= chunk
            num_prefilled += chunk
            if choice.num_to_prefill == 0:
                outputs.append(self._advance(choice))
        self._running = [choice for choice in self._running if choice.alive]
        self._totals.prompt_tokens += num_prefilled
        duration_s = self.simulated.step_ms / 1000 + (num_prefilled / rate if rate else 0.0)
        left_s = start_s + duration_s - self.clock()
        if left_s > 0:
            self.sleep(left_s)
        return outputs

    def _add_choice(self, request: EngineRequest, index: int, key: int) -> None:
        sampling = request.sampling
        prompt_index, copy = divmod(index, sampling.n)
        num_prompt_tokens = len(request.prompts[prompt_index])
        biases = zip(sampling.logit_bias_ids, sampling.logit_bias_values, strict=True)
        choice = _Choice(
            request_id=request.request_id,
            attempt=request.attempt,
            index=index,
            sampling=sampling,
            key=key if sampling.temperature == 0 else _mix(key ^ _mix(sampling.seed) ^ _mix(index << 1 | 1)),
            stop_ids=frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else self.eos_token_ids)),
            forced_ids=tuple(token for token, bias in biases if bias == FORCED_BIAS),
            max_tokens=min(sampling.max_tokens, self.limits.max_model_len - num_prompt_tokens),
            num_prompt_tokens=num_prompt_tokens,
            num_to_prefill=0 if copy else num_prompt_tokens,  # copies share the prompt's KV cache
            num_output=len(request.output_ids[index]) if request.output_ids else 0,
            to_score=request.prompts[prompt_index] if sampling.num_prompt_logprobs >= 0 else None,
        )
        self._requests.setdefault(request.request_id, {})[index] = choice
        self._num_added += 1
        heapq.heappush(self._waiting, (sampling.priority, self._num_added, choice))

    def _advance(self, choice: _Choice) -> ChoiceOutput:
        if choice.num_output >= choice.max_tokens:  # nothing was asked for, or an earlier attempt made it all
            return self._end(choice, (), FinishReason.LENGTH)
        token = self._token(choice)
        if token == self.simulated.fatal_token_id:
            raise RuntimeError(f"token {token} is fatal, by simulated.fatal_token_id")
        choice.num_output += 1
        self._totals.output_tokens += 1
        if token in choice.stop_ids:
            return self._end(choice, (token,), FinishReason.STOP)
        if choice.num_output == choice.max_tokens:
            return self._end(choice, (token,), FinishReason.LENGTH)
        return self._output(choice, (token,), FinishReason.RUNNING)

    def _token(self, choice: _Choice) -> int:
        if choice.forced_ids:
            return choice.forced_ids[choice.num_output % len(choice.forced_ids)]
        low, high = self.vocab_size // 8, max(self.vocab_size // 2, self.vocab_size // 8 + 1)
        offset = _mix(choice.key + choice.num_output) % (high - low)
        if choice.num_output < choice.sampling.min_tokens:
            allowed = (i for i in range(high - low) if low + (offset + i) % (high - low) not in choice.stop_ids)
            offset += next(allowed, 0)
        return low + offset % (high - low)

    def _end(self, choice: _Choice, token_ids: tuple[int, ...], reason: FinishReason) -> ChoiceOutput:
        choice.alive = False
        choices = self._requests[choice.request_id]
        del choices[choice.index]
        if not choices:
            del self._requests[choice.request_id]
        return self._output(choice, token_ids, reason)

    def _output(self, choice: _Choice, token_ids: tuple[int, ...], reason: FinishReason) -> ChoiceOutput:
        num_top = choice.sampling.num_logprobs
        logprobs = None
        if num_top >= 0 and token_ids:
            top = [token_ids[0], *((token_ids[0] + rank) % self.vocab_size for rank in range(num_top))]
            values = [-math.log(2), *(-(rank + 1) * math.log(2) for rank in range(num_top))]
            logprobs = Logprobs(np.array([top], dtype=np.uint32), np.array([values], dtype=np.float32))
        scored, choice.to_score = _prompt_logprobs(choice.to_score, choice.sampling.num_prompt_logprobs), None
        return ChoiceOutput(
            choice.request_id, choice.attempt, choice.index, token_ids, reason, logprobs, prompt_logprobs=scored
        )

    def _forget(self, request_id: str) -> None:
        for choice in self._requests.pop(request_id, {}).values():
            choice.alive = False
        self._running = [choice for choice in self._running if choice.alive]
        self._ended = [output for output in self._ended if output.request_id != request_id]


def _prompt_logprobs(prompt: TokenIds | None, num_top: int) -> Logprobs | None:
    """Each token is as likely as its id is small; the most likely ones are 0, 1, ..."""
    if prompt is None or len(prompt) < 2:
        return None
    top = np.broadcast_to(np.arange(num_top, dtype=np.uint32), (len(prompt) - 1, num_top))
    ids = np.concatenate([prompt[1:, None], top], axis=1).astype(np.uint32)
    return Logprobs(ids, -(1 + ids.astype(np.float32)))


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): spreads 64 bits well."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
