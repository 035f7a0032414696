"""The torch engine: scheduler, model and sampler tied together behind the interface of ``engine/core.py``.

Engine process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.checks import check_request
from engine.core import ChoiceOutput, EngineRequest, EngineStats, Logprobs, RequestRefused
from engine.model_files import eos_token_ids, num_token_ids
from engine.torch_core.batch import StepBatch, build_batch
from engine.torch_core.guide import GuideFailed, GuideMaker
from engine.torch_core.guide_queue import GuideQueue
from engine.torch_core.kv_cache import BlockPool
from engine.torch_core.request import Sequence, Status, sequences_of
from engine.torch_core.runner import Runner, load_runner
from engine.torch_core.sampler import Sampled, Sampler, prompt_logprobs
from engine.torch_core.scheduler import Chunk, Scheduler
from engine.torch_core.transfer import upload
from engine.torch_core.warm_up import warm_up
from tokservice.runtime.config import Config, EngineConfig
from tokservice.wire.messages import ALL_CHOICES, EngineLimits, FinishReason

LOGIT_ROWS = 64  # logits of a whole prompt are computed in slices of so many rows
GUIDE_WAIT_S = 0.005  # a step that has nothing else to do waits so long for a guide

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """A step whose tokens are not known yet; row i is for sequence i."""

    sequences: list[Sequence]
    sampled: Sampled


class TorchEngine:
    """Implements EngineCore."""

    def __init__(
        self, config: EngineConfig, runner: Runner, limits: EngineLimits, guides: GuideMaker, num_known_ids: int
    ) -> None:
        """``num_known_ids``: what lies above is padding of the vocabulary, and stands for no token."""
        self._limits = limits
        self._runner = runner
        self._num_known_ids = num_known_ids
        self._guide_end_ids = guides.end_ids
        self._guides = GuideQueue(guides)
        pool = BlockPool(runner.num_blocks, runner.block_size)
        self._scheduler = Scheduler(pool, runner.max_batched_tokens, config.max_num_seqs, config.prefix_caching)
        self._sampler = Sampler(limits.vocab_size, runner.device)
        self._requests: dict[str, dict[int, Sequence]] = {}  # unfinished choices
        self._ended: list[ChoiceOutput] = []  # final outputs that the next step returns
        self._in_flight: _StepInFlight | None = None
        self._prompt_logprobs: dict[Sequence, list[Logprobs]] = {}  # of the chunks computed so far
        self._num_added = 0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._num_cached_tokens = 0

    @property
    def limits(self) -> EngineLimits:
        """See EngineCore."""
        return self._limits

    @property
    def stats(self) -> EngineStats:
        """See EngineCore."""
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting + self._guides.num_waiting,
            kv_cache_used_tokens=self._scheduler.pool.num_used * self._runner.block_size,
            num_preemptions=self._scheduler.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_cached_tokens=self._num_cached_tokens,
        )

    def add(self, request: EngineRequest) -> None:
        """See EngineCore."""
        check_request(request, self._limits)
        known = self._requests.get(request.request_id, {})
        if any(sequence.attempt >= request.attempt for sequence in known.values()):
            return
        eos_ids = self._guide_end_ids if request.sampling.guide_kind else self._limits.eos_token_ids
        sequences = sequences_of(request, self._limits.max_model_len, eos_ids, self._num_added)
        self._num_added += len(sequences)
        self._drop(known.values())
        self._guides.drop(request.request_id)
        self._ended = [output for output in self._ended if output.request_id != request.request_id]
        if not sequences:
            self._requests.pop(request.request_id, None)
            return
        self._requests[request.request_id] = {sequence.choice: sequence for sequence in sequences}
        unfinished = []
        for sequence in sequences:
            if sequence.num_output_tokens and sequence.ending() is not FinishReason.RUNNING:
                self._ended.append(self._end(sequence, (), sequence.ending()))
            else:
                unfinished.append(sequence)
        if request.sampling.guide_kind and unfinished:
            self._guides.add(request.request_id, unfinished)
        else:
            for sequence in unfinished:
                self._scheduler.add(sequence)

    def abort(self, request_id: str, choice: int = ALL_CHOICES) -> None:
        """See EngineCore."""
        choices = self._requests.get(request_id, {})
        for index in list(choices) if choice == ALL_CHOICES else [choice]:
            if index in choices:
                self._ended.append(self._end(choices[index], (), FinishReason.ABORT))

    def has_work(self) -> bool:
        """See EngineCore."""
        return bool(self._ended or self._requests)

    @torch.inference_mode()
    def step(self) -> list[ChoiceOutput]:
        """See EngineCore.

        Where steps overlap (``Runner.overlaps``), a step's pass is queued before the tokens of the step before are
        read; its input ids never leave the device. So the device always has work, and the host uses the time of a
        pass for everything else. Sampling is queued after that reading: guides, penalties and lengths know every token
        before, as they do without overlap. A choice that is found ended has computed one row for nothing.
        """
        self._begin_guided()
        outputs, self._ended = self._ended, []
        chunks = self._scheduler.schedule()
        if chunks:
            batch = build_batch(chunks, self._runner.block_size, self._runner.max_lookup_tokens)
            hidden = self._runner.forward(batch, None if self._in_flight is None else self._in_flight.sampled)
            candidates = [
                (chunk.sequence, int(rows[-1]))
                for chunk, rows in zip(chunks, batch.row_of, strict=True)
                if chunk.samples
            ]
            self._collect_prompt_logprobs(chunks, batch, hidden)
            self._count(chunks)
            self._scheduler.commit(chunks)
            outputs += self._receive()
            self._sample(hidden, candidates)
            if not self._runner.overlaps:
                outputs += self._receive()
        elif self._in_flight is not None:
            outputs += self._receive()
        elif self._guides.num_waiting:
            if not outputs:
                self._guides.wait(GUIDE_WAIT_S)
        elif self._requests:
            raise RuntimeError(f"{len(self._requests)} requests wait, and none can be scheduled")
        return outputs

    def _begin_guided(self) -> None:
        """Schedule the requests whose guides are compiled by now."""
        for sequences, guides in self._guides.ready():
            if isinstance(guides, RequestRefused):
                # The tokenizer worker took it for a grammar, but cannot know what it costs with this vocabulary.
                log.warning("guide refused request_id=%s reason=%s", sequences[0].request_id, guides)
            for index, sequence in enumerate(sequences):
                if sequence.status is Status.FINISHED:  # aborted meanwhile
                    continue
                if isinstance(guides, RequestRefused):
                    self._ended.append(self._end(sequence, (), FinishReason.GUIDE_FAILED))
                else:
                    self._scheduler.add(sequence)
                    self._sampler.set_guide(sequence, guides[index])

    def _sample(self, hidden: Tensor, candidates: list[tuple[Sequence, int]]) -> None:
        """Queue the choice of a token for each sequence that has not ended, from its row of the hidden states."""
        alive = [(sequence, row) for sequence, row in candidates if sequence.status is not Status.FINISHED]
        if not alive:
            return
        sequences = [sequence for sequence, _ in alive]
        rows = upload([row for _, row in alive], self._runner.device)
        sampled = self._sampler.sample(self._logits(hidden, rows), sequences)
        for row, sequence in enumerate(sequences):
            sequence.expect(row)
        self._in_flight = _StepInFlight(sequences, sampled)

    def _logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Logits (num_rows, vocab_size) of some rows of the hidden states; padding of the vocabulary is impossible."""
        logits = self._runner.model.logits(hidden.index_select(0, rows))
        logits[:, self._num_known_ids :] = -torch.inf
        return logits

    def _receive(self) -> list[ChoiceOutput]:
        """Wait for the tokens that are being sampled, if there are any."""
        if self._in_flight is None:
            return []
        step, self._in_flight = self._in_flight, None
        tokens = step.sampled.read()
        outputs = []
        for row, sequence in enumerate(step.sequences):
            if sequence.status is Status.FINISHED:  # aborted or replaced meanwhile
                continue
            if sequence.max_tokens == 0:  # only the prompt's logprobs were wanted
                outputs.append(self._end(sequence, (), FinishReason.LENGTH))
            elif not tokens.valid[row]:
                log.warning("no token can follow request_id=%s choice=%d", sequence.request_id, sequence.choice)
                outputs.append(self._end(sequence, (), _no_token_reason(sequence)))
            else:
                outputs.append(self._advance(sequence, int(tokens.token_ids[row]), tokens.logprobs.get(row)))
        return outputs

    def _advance(self, sequence: Sequence, token: int, logprobs: Logprobs | None) -> ChoiceOutput:
        sequence.arrive(token)
        self._num_output_tokens += 1
        reason = sequence.ending()
        if reason is FinishReason.RUNNING:
            try:
                self._sampler.accept(sequence, token)
            except GuideFailed as error:
                log.warning("guide failed request_id=%s error=%s", sequence.request_id, error)
                reason = FinishReason.GUIDE_FAILED
        if reason is FinishReason.RUNNING:
            return self._output(sequence, (token,), reason, logprobs)
        return self._end(sequence, (token,), reason, logprobs)

    def _end(
        self, sequence: Sequence, token_ids: tuple[int, ...], reason: FinishReason, logprobs: Logprobs | None = None
    ) -> ChoiceOutput:
        output = self._output(sequence, token_ids, reason, logprobs)
        self._drop([sequence])
        choices = self._requests[sequence.request_id]
        del choices[sequence.choice]
        if not choices:
            del self._requests[sequence.request_id]
            self._guides.drop(sequence.request_id)
        return output

    def _output(
        self, sequence: Sequence, token_ids: tuple[int, ...], reason: FinishReason, logprobs: Logprobs | None
    ) -> ChoiceOutput:
        scored = self._prompt_logprobs.pop(sequence, None) if sequence.first_output else None
        cached = sequence.num_cached_tokens if sequence.first_output else 0
        sequence.first_output = False
        return ChoiceOutput(
            sequence.request_id,
            sequence.attempt,
            sequence.choice,
            token_ids,
            reason,
            logprobs,
            cached,
            _joined(scored) if scored else None,
        )

    def _drop(self, sequences: Iterable[Sequence]) -> None:
        """Free whatever unfinished sequences hold."""
        held = [sequence for sequence in sequences if sequence.status is not Status.FINISHED]
        self._scheduler.finish(held)
        for sequence in held:
            self._sampler.forget(sequence)
            self._prompt_logprobs.pop(sequence, None)

    def _count(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self._num_prompt_tokens += max(0, min(chunk.end, chunk.sequence.num_prompt_tokens) - chunk.start)
            if chunk.start == chunk.sequence.num_cached_tokens and chunk.sequence.first_output:
                self._num_cached_tokens += chunk.start

    def _collect_prompt_logprobs(self, chunks: list[Chunk], batch: StepBatch, hidden: Tensor) -> None:
        for chunk, rows in zip(chunks, batch.row_of, strict=True):
            sequence = chunk.sequence
            if not sequence.wants_prompt_logprobs:
                continue
            if chunk.start == 0:  # the first chunk, or all anew after a preemption
                self._prompt_logprobs[sequence] = []
            # Row i predicts token i + 1; the first prompt token has no prediction.
            last = min(chunk.end, sequence.num_prompt_tokens - 1)
            for lo in range(chunk.start, last, LOGIT_ROWS):
                hi = min(lo + LOGIT_ROWS, last)
                wanted = upload(rows[lo - chunk.start : hi - chunk.start], hidden.device)
                logits = self._logits(hidden, wanted)
                targets = sequence.tokens[lo + 1 : hi + 1].astype(np.int64)
                scored = prompt_logprobs(logits, targets, sequence.sampling.num_prompt_logprobs)
                self._prompt_logprobs[sequence].append(scored)
            sequence.wants_prompt_logprobs = chunk.end < sequence.num_prompt_tokens


def _no_token_reason(sequence: Sequence) -> FinishReason:
    """Why no token can follow: a guide may allow none, or have grown too complex to say."""
    return FinishReason.GUIDE_FAILED if sequence.sampling.guide_kind else FinishReason.ERROR


def _joined(parts: list[Logprobs]) -> Logprobs:
    return Logprobs(
        np.concatenate([part.token_ids for part in parts]), np.concatenate([part.logprobs for part in parts])
    )


def load_torch_engine(config: Config, model_dir: Path, tell: Callable[[str], None]) -> TorchEngine:
    """Read a model folder and build the engine. Raises StartupError with one line for the operator."""
    settings = config.engine
    runner = load_runner(config, model_dir, tell)
    tell("warming up")
    warm_up(runner)
    limits = EngineLimits(
        max_model_len=runner.max_model_len,
        vocab_size=runner.model.spec.vocab_size,
        kv_cache_tokens=runner.num_blocks * runner.block_size,
        eos_token_ids=eos_token_ids(model_dir, runner.model.spec.vocab_size),
        max_num_seqs=settings.max_num_seqs,
    )
    num_ids = num_token_ids(model_dir)
    guides = GuideMaker(model_dir, limits.vocab_size, limits.eos_token_ids, num_ids)
    num_known_ids = max(num_ids or limits.vocab_size, 1 + max(limits.eos_token_ids, default=-1))
    return TorchEngine(settings, runner, limits, guides, num_known_ids)
