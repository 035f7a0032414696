"""A detokenizer worker: sockets around ``Responder`` and ``Turns``. One message in per engine step, one out per API
process; what takes long is sent when it is done."""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokservice.detokenizer.logprob_rows import LogprobRows
from tokservice.detokenizer.logprob_rows import view as rows_of
from tokservice.detokenizer.outgoing import Outgoing
from tokservice.detokenizer.respond import Fed, Responder
from tokservice.detokenizer.turns import Step, Turns
from tokservice.detokenizer.vocabulary import load
from tokservice.runtime.links import RouterLink
from tokservice.runtime.metrics import Metrics
from tokservice.runtime.process import Process, run_process
from tokservice.runtime.work_mark import WorkMark, encode_mark
from tokservice.wire.channels import listen_pull
from tokservice.wire.codec import TOKEN_BYTES
from tokservice.wire.errors import WireError
from tokservice.wire.messages import (
    Abort,
    Begin,
    EngineOutputs,
    FinishReason,
    Message,
    PromptLogprobs,
    ReadyFlags,
    Role,
    Topology,
    Undelivered,
)

IDLE_S = 1.0
MAX_ENDED = 10_000  # ids of ended requests whose last engine outputs may still arrive
MAX_WAITING = 1 << 16  # steps of requests; while there are more, those to come wait in the inbox

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    attempt: int
    engine: str
    responder: Responder
    stream: int  # ReadyFlags.STREAM, or 0
    mark: bytes  # see WorkMark


class Detokenizer:
    """The service that ``Process.run`` drives."""

    def __init__(self, process: Process) -> None:
        self._vocabulary = load(Path(process.config.model.path))
        self._open: dict[str, _Open] = {}
        self._turns = Turns()
        self._ended: OrderedDict[str, int] = OrderedDict()  # the attempt that ended
        self._num_messages = 0
        self._mark = WorkMark(process.run_dir, process.identity)
        self._process = process
        self._inbox = listen_pull(process.context, process.endpoint("out"))
        self.hello = process.hello(endpoints=(self._inbox.endpoint,))
        process.add(self._inbox, lambda _, message: self._on_message(message))
        self._router = RouterLink(process, lambda: self.hello, self._from_router, self._forget_all)
        self._outgoing = Outgoing(self._router.send)

    def on_topology(self, topology: Topology) -> None:
        """See ``Service``. What a dead engine had begun goes on elsewhere."""
        self._router.follow(topology)
        living = {peer.identity for peer in topology.peers}
        for request_id in [key for key, request in self._open.items() if request.engine not in living]:
            self._forget(request_id)

    def turn(self, now: float) -> float:
        """See ``Service``: most work is done as messages arrive; what takes long, slice by slice."""
        if self._turns:
            self._go_on(self._turns.next_request)
        self._process.listen(self._inbox, self._turns.num_steps <= MAX_WAITING)
        return 0.0 if self._turns else IDLE_S

    def drain(self) -> None:
        """See ``Service``: the router decides what still runs."""

    def report(self, metrics: Metrics) -> tuple[int, int]:
        """See ``Service``."""
        return self._num_messages, len(self._open)

    def _on_message(self, message: Message) -> None:
        self._num_messages += 1
        match message:
            case EngineOutputs():
                self._outputs(message)
            case Begin():
                self._begin(message)
            case PromptLogprobs():
                self._prompt_logprobs(message)
        self._mark.clear()

    def _from_router(self, message: Message) -> None:
        """An attempt that was given up: its engine says no more of it, but its Begin may still be on the way."""
        if isinstance(message, Abort):
            request = self._open.get(message.request_id)
            if request is not None and request.attempt <= message.attempt:
                self._forget(message.request_id)
            self._note_end(message.request_id, message.attempt)

    def _begin(self, message: Begin) -> None:
        known = self._open.get(message.request_id)
        if known is not None and known.attempt >= message.attempt:
            return
        if message.attempt <= self._ended.get(message.request_id, 0):
            return
        mark = encode_mark(message.request_id, message.attempt)
        self._mark.set(mark)
        context, *outputs = message.frames
        outputs, notes = outputs[: len(message.num_delivered)], outputs[len(message.num_delivered) :]
        try:
            output_ids = [memoryview(ids).cast("B").cast("I") for ids in outputs]
            responder = Responder(self._vocabulary, context, message.num_delivered, message.finished, output_ids, notes)
            if known is not None:
                self._forget(message.request_id)
            step = Step(responder.beginning())
            feds = self._turns.begin(message.request_id, step)
        except WireError as error:
            self._refuse(message.request_id, message.attempt, error)
            return
        stream = ReadyFlags.STREAM if responder.stream else 0
        self._open[message.request_id] = _Open(message.attempt, message.engine, responder, stream, mark)
        self._tell(message.request_id, [(step, fed) for fed in feds])

    def _go_on(self, request_id: str) -> None:
        """A request's turn."""
        request = self._open[request_id]
        self._mark.set(request.mark)
        try:
            self._tell(request_id, self._turns.go_on(request_id))
        except WireError as error:
            self._forget(request_id)
            self._refuse(request_id, request.attempt, error)
        self._mark.clear()

    def _refuse(self, request_id: str, attempt: int, error: WireError) -> None:
        log.error("malformed request request_id=%s error=%s", request_id, error)
        self._router.send(Undelivered((request_id,), (attempt,)))

    def _tell(self, request_id: str, results: Sequence[tuple[Step, Fed]]) -> None:
        """Send what came of one request's steps."""
        request = self._open[request_id]
        for step, fed in results:
            self._add(request_id, request, fed, step.token_ids, step.finish_reason)
        self._outgoing.flush()

    def _prompt_logprobs(self, message: PromptLogprobs) -> None:
        request = self._open.get(message.request_id)
        if request is None or request.attempt != message.attempt:
            return
        if message.choice < request.responder.num_choices:
            self._mark.set(request.mark)
            rows = rows_of(1 + message.num_top, *message.frames)
            request.responder.score_prompt(message.choice, rows)

    def _outputs(self, message: EngineOutputs) -> None:
        ids = memoryview(message.frames[0]).cast("B").cast("I")
        unknown: dict[str, int] = {}
        cached = message.num_cached_tokens or (0,) * len(message.request_ids)
        all_rows = _logprob_rows(message)
        start = 0
        columns = zip(
            message.request_ids,
            message.attempts,
            message.choices,
            message.num_tokens,
            message.finish_reasons,
            cached,
            strict=True,
        )
        for request_id, attempt, choice, num_tokens, finish_reason, num_cached in columns:
            end = start + num_tokens
            logprobs = next(all_rows, None)
            request = self._open.get(request_id)
            if request is not None and request.attempt == attempt and choice < request.responder.num_choices:
                self._mark.set(request.mark)
                reason, new_ids = FinishReason(finish_reason), ids[start:end]
                for fed in self._feed(request_id, request, choice, new_ids, reason, num_cached, logprobs):
                    self._add(request_id, request, fed, new_ids, reason)
            elif attempt > self._ended.get(request_id, 0) and (request is None or attempt > request.attempt):
                unknown[request_id] = attempt
            start = end
        self._outgoing.flush()
        if unknown:
            self._router.send(Undelivered(tuple(unknown), tuple(unknown.values())))

    def _feed(
        self,
        request_id: str,
        request: _Open,
        choice: int,
        token_ids: Sequence[int],
        reason: FinishReason,
        num_cached: int,
        logprobs: LogprobRows | None,
    ) -> Sequence[Fed]:
        """Consume a row of a step; what came of it at once."""
        responder = request.responder
        waits = request_id in self._turns
        if waits and reason == FinishReason.ABORT and not responder.has_ended(choice):
            return (Fed(choice, finish_reason=reason, last=True),)  # nobody wants what is being written
        fed = None if waits else responder.feed_text(choice, token_ids, reason, num_cached)
        if fed is not None:
            return (fed,)
        work = responder.feeding(choice, token_ids, reason, num_cached, logprobs)
        return self._turns.begin(request_id, Step(work, token_ids, reason))

    def _add(self, request_id: str, request: _Open, fed: Fed, token_ids: Sequence[int], reason: FinishReason) -> None:
        """``token_ids``, ``reason``: what was fed."""
        flags = request.stream
        if fed.finish_reason == FinishReason.STOP and reason == FinishReason.RUNNING:
            flags |= ReadyFlags.STOPPED
        if fed.last:
            flags |= ReadyFlags.LAST
            self._forget(request_id)
            self._note_end(request_id, request.attempt)
        if fed.num_consumed or fed.data or fed.finish_reason or fed.last:
            self._outgoing.add(request_id, request.attempt, fed, flags, token_ids[: fed.num_consumed])

    def _forget(self, request_id: str) -> None:
        del self._open[request_id]
        self._turns.drop(request_id)

    def _forget_all(self) -> None:
        self._open.clear()
        self._turns.clear()

    def _note_end(self, request_id: str, attempt: int) -> None:
        self._ended[request_id] = max(attempt, self._ended.get(request_id, 0))
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)


def _logprob_rows(message: EngineOutputs) -> Iterator[LogprobRows | None]:
    """The logprobs of each row's tokens, where any row has them."""
    start = 0
    for num_tokens, num_top in zip(message.num_tokens, message.num_top, strict=False):
        if num_top < 0:
            yield None
            continue
        end = start + num_tokens * (1 + num_top) * TOKEN_BYTES
        ids, values = [memoryview(frame).cast("B")[start:end] for frame in message.frames[1:3]]
        yield rows_of(1 + num_top, ids, values)
        start = end


def main(argv: Sequence[str] | None = None) -> int:
    """Entry: ``python -m tokservice.detokenizer.detokenizer_proc --config FILE``."""

    def body(process: Process) -> int:
        detokenizer = Detokenizer(process)
        process.control.send(detokenizer.hello)
        return process.run(detokenizer)

    return run_process(Role.DETOKENIZER, argv, body)


if __name__ == "__main__":
    sys.exit(main())
