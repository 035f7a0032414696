"""The engine process: sockets around an engine core.

Token ids come in from the tokenizer workers (and, after a death, from the router), tokens go out to the
detokenizer workers, one message per step to each. Imports no torch itself.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine.checks import MAX_CHOICES
from engine.core import ChoiceOutput, EngineCore, EngineRequest, Logprobs, RequestRefused
from engine.load import build_core
from tokservice.runtime.config import EngineConfig
from tokservice.runtime.links import PeerLinks, RouterLink
from tokservice.runtime.metrics import Metrics
from tokservice.runtime.process import Process, run_process
from tokservice.wire.channels import listen_pull
from tokservice.wire.codec import decode_part
from tokservice.wire.errors import PeerLost, WireError
from tokservice.wire.messages import (
    ALL_CHOICES,
    Abort,
    Begin,
    Buffer,
    EngineOutputs,
    FinishReason,
    Generate,
    Message,
    PromptLogprobs,
    Role,
    SamplingParams,
    Topology,
    Undelivered,
)

READS_PER_STEP = 64  # each takes a channel's share: a burst of requests begins in one step
MAX_EARLY_ABORTS = 10_000
IDLE_S = 1.0
TOKEN_IDS = np.dtype("<u4")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    attempt: int
    detokenizer: str
    unfinished: set[int]  # choices


@dataclass(slots=True)
class _Rows:
    """The columns of one EngineOutputs."""

    outputs: list[ChoiceOutput] = field(default_factory=list)

    def message(self) -> EngineOutputs:
        rows = self.outputs
        frames = [np.array([token for row in rows for token in row.token_ids], TOKEN_IDS).tobytes()]
        num_top: tuple[int, ...] = ()
        if any(row.logprobs is not None for row in rows):
            num_top = tuple(-1 if row.logprobs is None else row.logprobs.token_ids.shape[1] - 1 for row in rows)
            tables = [row.logprobs for row in rows if row.logprobs is not None]
            frames.append(b"".join(table.token_ids.astype(TOKEN_IDS).tobytes() for table in tables))
            frames.append(b"".join(table.logprobs.astype("<f4").tobytes() for table in tables))
        cached = tuple(row.num_cached_tokens for row in rows)
        return EngineOutputs(
            request_ids=tuple(row.request_id for row in rows),
            attempts=tuple(row.attempt for row in rows),
            choices=tuple(row.choice for row in rows),
            num_tokens=tuple(len(row.token_ids) for row in rows),
            finish_reasons=tuple(row.finish_reason for row in rows),
            num_top=num_top,
            num_cached_tokens=cached if any(cached) else (),
            frames=tuple(frames),
        )


class Engine:
    """The service that ``Process.run`` drives."""

    def __init__(self, process: Process, core: EngineCore) -> None:
        self._core = core
        self._num_steps = 0
        self._running: dict[str, _Running] = {}
        self._early_aborts: OrderedDict[str, int] = OrderedDict()  # attempts aborted before they arrived
        self._detokenizers = PeerLinks(process, Role.DETOKENIZER)
        inbox = listen_pull(process.context, process.endpoint("ids"))
        self.hello = process.hello(endpoints=(inbox.endpoint,), limits=core.limits)
        process.add(inbox, lambda _, message: self._on_message(message))
        self._router = RouterLink(process, lambda: self.hello, self._on_message, self._abort_all)

    def on_topology(self, topology: Topology) -> None:
        """See ``Service``."""
        self._detokenizers.follow(topology)
        self._router.follow(topology)

    def turn(self, now: float) -> float:
        """See ``Service``: one engine step, if there is work."""
        if not self._core.has_work():
            return IDLE_S
        self._deliver(self._core.step())
        self._num_steps += 1
        return 0.0

    def drain(self) -> None:
        """See ``Service``: the router decides what still runs."""

    def report(self, metrics: Metrics) -> tuple[int, int]:
        """See ``Service``."""
        stats = self._core.stats
        capacity = self._core.limits.kv_cache_tokens
        metrics.set("num_requests_running", stats.num_running)
        metrics.set("num_requests_waiting", stats.num_waiting)
        metrics.set("kv_cache_usage_perc", stats.kv_cache_used_tokens / capacity if capacity else 0.0)
        metrics.set("num_preemptions_total", stats.num_preemptions)
        metrics.set("prefix_cache_hit_tokens_total", stats.num_cached_tokens)
        metrics.set("engine_prompt_tokens_total", stats.num_prompt_tokens)
        metrics.set("engine_generation_tokens_total", stats.num_output_tokens)
        metrics.set("engine_steps_total", self._num_steps)
        return self._num_steps, len(self._running)

    def _on_message(self, message: Message) -> None:
        match message:
            case Generate():
                self._generate(message)
            case Abort():
                self._abort(message)

    def _generate(self, message: Generate) -> None:
        known = self._running.get(message.request_id)
        if known is not None and known.attempt >= message.attempt:
            return
        try:
            request, context = _read(message)
        except WireError as error:
            log.error("malformed request request_id=%s error=%s", message.request_id, error)
            self._router.send(Undelivered((message.request_id,), (message.attempt,)))
            return
        running = _Running(message.attempt, message.detokenizer, set(range(request.num_choices)))
        running.unfinished -= {choice for choice, reason in enumerate(request.finished) if reason}
        self._running[message.request_id] = running
        begin = Begin(
            request_id=message.request_id,
            attempt=message.attempt,
            engine=self.hello.identity,
            num_delivered=message.num_delivered,
            finished=message.finished,
            has_notes=message.has_notes,
            frames=(context, *message.frames[2 + message.num_prompts :]),
        )
        if not self._send(running.detokenizer, begin, [(message.request_id, message.attempt)]):
            self._core.abort(message.request_id)  # an older attempt, if there is one
            del self._running[message.request_id]
            return
        if self._early_aborts.pop(message.request_id, 0) >= message.attempt:
            self._core.abort(message.request_id)  # an older attempt, if there is one
            self._end_all(message, running, FinishReason.ABORT)
            return
        try:
            self._core.add(request)
        except RequestRefused as error:
            # The tokenizer worker checked all this against our limits: a fault of ours, but this request's alone.
            log.error("request refused request_id=%s reason=%s", message.request_id, error)
            self._end_all(message, running, FinishReason.ERROR)

    def _end_all(self, message: Generate, running: _Running, reason: FinishReason) -> None:
        self._deliver([ChoiceOutput(message.request_id, message.attempt, i, (), reason) for i in running.unfinished])

    def _abort(self, message: Abort) -> None:
        running = self._running.get(message.request_id)
        if running is not None and running.attempt <= message.attempt:
            self._core.abort(message.request_id, message.choice)
        elif running is None and message.choice == ALL_CHOICES:
            known_attempt = self._early_aborts.get(message.request_id, 0)
            self._early_aborts[message.request_id] = max(message.attempt, known_attempt)
            if len(self._early_aborts) > MAX_EARLY_ABORTS:
                self._early_aborts.popitem(last=False)

    def _abort_all(self) -> None:
        """The router is gone, and with it everyone who waits."""
        for request_id in self._running:
            self._core.abort(request_id)
        self._running.clear()
        self._early_aborts.clear()

    def _deliver(self, outputs: list[ChoiceOutput]) -> None:
        rows: defaultdict[str, _Rows] = defaultdict(_Rows)
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is None or running.attempt != output.attempt:
                continue
            if output.prompt_logprobs is not None:
                message = _prompt_message(output, output.prompt_logprobs)
                if not self._send(running.detokenizer, message, [(output.request_id, output.attempt)]):
                    self._drop(output.request_id, output.attempt)
                    continue
            rows[running.detokenizer].outputs.append(output)
            if output.finish_reason != FinishReason.RUNNING:
                running.unfinished.discard(output.choice)
                if not running.unfinished:
                    del self._running[output.request_id]
        for detokenizer, batch in rows.items():
            keys = [(output.request_id, output.attempt) for output in batch.outputs]
            if not self._send(detokenizer, batch.message(), keys):
                for request_id, attempt in keys:  # what followed would go on with a gap
                    self._drop(request_id, attempt)

    def _drop(self, request_id: str, attempt: int) -> None:
        running = self._running.get(request_id)
        if running is not None and running.attempt == attempt:
            del self._running[request_id]
            self._core.abort(request_id)

    def _send(self, detokenizer: str, message: Message, keys: list[tuple[str, int]]) -> bool:
        try:
            self._detokenizers.send(detokenizer, message)
        except PeerLost as lost:
            log.warning("output not delivered requests=%d peer=%s", len(keys), lost)
            request_ids, attempts = zip(*dict.fromkeys(keys), strict=True)
            self._router.send(Undelivered(request_ids, attempts))
            return False
        return True


def _read(message: Generate) -> tuple[EngineRequest, Buffer]:
    """The core's request in a message, and the context for the detokenizer. Raises WireError."""
    first_prompt, first_output = 2, 2 + message.num_prompts
    first_note = first_output + len(message.num_delivered)
    ids = [np.frombuffer(frame, TOKEN_IDS) for frame in message.frames[first_prompt:first_note]]
    if any(reason not in FinishReason.__members__.values() for reason in message.finished):
        raise WireError("unknown finish reason")
    request = EngineRequest(
        request_id=message.request_id,
        attempt=message.attempt,
        sampling=decode_part(SamplingParams, message.frames[0]),
        prompts=tuple(ids[: message.num_prompts]),
        output_ids=tuple(ids[message.num_prompts :]),
        finished=tuple(FinishReason(reason) for reason in message.finished),
    )
    if not 1 <= request.num_choices <= MAX_CHOICES:
        raise WireError(f"{request.num_choices} choices")
    if request.finished and len(request.finished) != request.num_choices:
        raise WireError(f"{first_note - first_output} outputs for {request.num_choices} choices")
    return request, message.frames[1]


def _prompt_message(output: ChoiceOutput, rows: Logprobs) -> PromptLogprobs:
    return PromptLogprobs(
        request_id=output.request_id,
        attempt=output.attempt,
        choice=output.choice,
        num_top=rows.token_ids.shape[1] - 1,
        frames=(rows.token_ids.astype(TOKEN_IDS).tobytes(), rows.logprobs.astype("<f4").tobytes()),
    )


def _has_gpu(settings: EngineConfig) -> bool:
    return settings.device.startswith("cuda") or (settings.device == "auto" and Path("/dev/nvidiactl").exists())


def main(argv: Sequence[str] | None = None) -> int:
    """Entry: ``python -m engine.engine_proc --config FILE``."""

    def body(process: Process) -> int:
        settings = process.config.engine
        if settings.kind == "simulated" or not _has_gpu(settings):
            os.nice(settings.nice)  # before torch starts its threads, which inherit it
        start = time.monotonic()
        engine = Engine(process, build_core(process.config, Path(process.config.model.path), process.tell))
        log.info(
            "engine ready kind=%s seconds=%.1f limits=%s", settings.kind, time.monotonic() - start, engine.hello.limits
        )
        process.control.send(engine.hello)
        return process.run(engine, reads_per_turn=READS_PER_STEP)

    return run_process(Role.ENGINE, argv, body)


if __name__ == "__main__":
    sys.exit(main())
