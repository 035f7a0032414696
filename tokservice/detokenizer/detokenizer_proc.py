"""A detokenizer worker: sockets around ``Responder``. One message in per engine step, one out per API process."""

from __future__ import annotations

import logging
import sys
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokservice.detokenizer.logprob_rows import LogprobRows
from tokservice.detokenizer.logprob_rows import view as rows_of
from tokservice.detokenizer.respond import Fed, Responder
from tokservice.detokenizer.vocabulary import load
from tokservice.runtime.links import RouterLink
from tokservice.runtime.metrics import Metrics
from tokservice.runtime.process import Process, run_process
from tokservice.runtime.work_mark import WorkMark, encode_mark
from tokservice.wire.channels import listen_pull
from tokservice.wire.codec import MAX_CHUNK_BYTES, TOKEN_BYTES
from tokservice.wire.errors import WireError
from tokservice.wire.messages import (
    Abort,
    Begin,
    EngineOutputs,
    FinishReason,
    Message,
    Progress,
    PromptLogprobs,
    ReadyFlags,
    Role,
    Topology,
    Undelivered,
)

IDLE_S = 1.0
MAX_ENDED = 10_000  # ids of ended requests whose last engine outputs may still arrive

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    attempt: int
    engine: str
    responder: Responder
    stream: int  # ReadyFlags.STREAM, or 0
    mark: bytes  # see WorkMark


@dataclass(slots=True)
class _Rows:
    """The columns of one Progress."""

    request_ids: list[str] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    finish_reasons: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    ids: array[int] = field(default_factory=lambda: array("I"))
    data: list[bytes] = field(default_factory=list)
    notes: list[bytes] = field(default_factory=list)

    def add(self, request_id: str, attempt: int, fed: Fed, flags: int, ids: Sequence[int]) -> None:
        self.request_ids.append(request_id)
        self.attempts.append(attempt)
        self.choices.append(fed.choice)
        self.num_tokens.append(fed.num_consumed)
        self.finish_reasons.append(fed.finish_reason)
        self.statuses.append(fed.status)
        self.flags.append(flags)
        self.ids.extend(ids)
        self.data.append(fed.data)
        self.notes.append(fed.note)

    def message(self) -> Progress:
        notes = b"".join(self.notes)
        return Progress(
            request_ids=tuple(self.request_ids),
            attempts=tuple(self.attempts),
            choices=tuple(self.choices),
            num_tokens=tuple(self.num_tokens),
            finish_reasons=tuple(self.finish_reasons),
            statuses=tuple(self.statuses),
            flags=tuple(self.flags),
            num_bytes=tuple(map(len, self.data)),
            num_note_bytes=tuple(map(len, self.notes)) if notes else (),
            frames=(self.ids.tobytes(), b"".join(self.data), *((notes,) if notes else ())),
        )


class Detokenizer:
    """The service that ``Process.run`` drives."""

    def __init__(self, process: Process) -> None:
        self._vocabulary = load(Path(process.config.model.path))
        self._open: dict[str, _Open] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()  # the attempt that ended
        self._num_messages = 0
        self._mark = WorkMark(process.run_dir, process.identity)
        inbox = listen_pull(process.context, process.endpoint("out"))
        self.hello = process.hello(endpoints=(inbox.endpoint,))
        process.add(inbox, lambda _, message: self._on_message(message))
        self._router = RouterLink(process, lambda: self.hello, self._from_router, self._open.clear)

    def on_topology(self, topology: Topology) -> None:
        """See ``Service``. What a dead engine had begun goes on elsewhere."""
        self._router.follow(topology)
        living = {peer.identity for peer in topology.peers}
        for request_id in [key for key, request in self._open.items() if request.engine not in living]:
            del self._open[request_id]

    def turn(self, now: float) -> float:
        """See ``Service``: all work is done as messages arrive."""
        return IDLE_S

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
                del self._open[message.request_id]
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
        except WireError as error:
            log.error("malformed request request_id=%s error=%s", message.request_id, error)
            self._router.send(Undelivered((message.request_id,), (message.attempt,)))
            return
        stream = ReadyFlags.STREAM if responder.stream else 0
        request = _Open(message.attempt, message.engine, responder, stream, mark)
        self._open[message.request_id] = request
        rows = _Rows()
        for fed in responder.begin():
            self._add(rows, message.request_id, request, fed, (), FinishReason.RUNNING)
        if rows.request_ids:
            self._router.send(rows.message())

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
        by_api: defaultdict[str, _Rows] = defaultdict(_Rows)
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
                reason = FinishReason(finish_reason)
                fed = request.responder.feed(choice, ids[start:end], reason, num_cached, logprobs)
                new_ids = ids[start : start + fed.num_consumed]
                rows = by_api[request_id.rpartition(":")[0]]
                self._add(rows, request_id, request, fed, new_ids, reason)
                if len(fed.data) > MAX_CHUNK_BYTES:  # nothing is joined to what is large
                    self._router.send(rows.message())
                    del by_api[request_id.rpartition(":")[0]]
            elif attempt > self._ended.get(request_id, 0) and (request is None or attempt > request.attempt):
                unknown[request_id] = attempt
            start = end
        for rows in by_api.values():
            self._router.send(rows.message())
        if unknown:
            self._router.send(Undelivered(tuple(unknown), tuple(unknown.values())))

    def _add(
        self, rows: _Rows, request_id: str, request: _Open, fed: Fed, ids: Sequence[int], reason: FinishReason
    ) -> None:
        flags = request.stream
        if fed.finish_reason == FinishReason.STOP and reason == FinishReason.RUNNING:
            flags |= ReadyFlags.STOPPED
        if fed.last:
            flags |= ReadyFlags.LAST
            del self._open[request_id]
            self._note_end(request_id, request.attempt)
        if fed.num_consumed or fed.data or fed.finish_reason or fed.last:
            rows.add(request_id, request.attempt, fed, flags, ids)

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
