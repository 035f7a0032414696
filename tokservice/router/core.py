"""The router's decisions. Pure: messages and the time in, messages out; no sockets, no clock, no body parsed.

It knows every unfinished request: where it is, its attempt, its journal. It admits, assigns, passes results
on and aborts; ``recovery.py`` begins requests again whose worker died. What is to be sent is appended to
``outbox`` as (identity, message).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from tokservice.router.ledger import Ledger
from tokservice.router.recovery import Recovery
from tokservice.router.replies import Replies
from tokservice.router.request import Request, State
from tokservice.router.tokenizer_pool import Assignment, TokenizerPool
from tokservice.runtime.config import RouterConfig, TokenizerConfig
from tokservice.runtime.metrics import Metrics
from tokservice.wire.codec import TOKEN_BYTES
from tokservice.wire.errors import (
    DRAINING,
    INTERNAL,
    NOT_READY,
    OVERLOADED,
    QUEUE_TIMEOUT,
    TOTAL_TIMEOUT,
    RequestError,
)
from tokservice.wire.messages import (
    Abort,
    Accepted,
    Answered,
    BodyChunk,
    Buffer,
    FinishReason,
    Hello,
    Prepare,
    Progress,
    ReadyBytes,
    ReadyFlags,
    Rejected,
    Role,
    Submit,
    Topology,
    Undelivered,
)

CHUNK_OVERHEAD_BYTES = 256  # what a piece of body costs beside its bytes
BUSY_TICK_S = 0.02
IDLE_TICK_S = 0.5
SWEEP_INTERVAL_S = 1.0
_CLIENT_FLAGS = ReadyFlags.STREAM | ReadyFlags.LAST


class RouterCore:
    """See the module's docstring. ``now_s`` is monotonic and in seconds throughout."""

    def __init__(self, settings: RouterConfig, tokenizers: TokenizerConfig, metrics: Metrics) -> None:
        self.draining = False
        self.ledger = Ledger()
        self._settings = settings
        self._metrics = metrics
        self._pool = TokenizerPool(tokenizers, settings.long_body_bytes, settings.long_wait_s)
        self._replies = Replies(self.ledger, self._pool, metrics)
        self._recovery = Recovery(self.ledger, self._pool, self._replies, metrics)
        self.outbox = self._replies.outbox
        self._was_ready = False
        self._next_sweep_s = 0.0

    @property
    def num_unfinished(self) -> int:
        """Requests whose client still waits, and tombstones."""
        return len(self.ledger)

    # --- from API processes

    def submit(self, api: str, message: Submit, now_s: float) -> None:
        """A request's headers and first piece of body."""
        if self.ledger.is_dead(api):
            return
        error = self._reason_to_refuse(message)
        if error is not None:
            self._metrics.add("requests_total", outcome=error.code or "refused")
            self._replies.answer(api, message.request_id, error.status, error.body(message.route))
            return
        request = Request(message.request_id, api, message.route, now_s, message.session)
        self.ledger.add(request)
        self.ledger.hold(request, max(0, message.content_length))
        self._add_body(request, message.frames, message.complete, now_s)

    def body_chunk(self, message: BodyChunk, now_s: float) -> None:
        """More body; of an unknown request (refused meanwhile) it is dropped."""
        request = self.ledger.find(message.request_id)
        if request is not None and request.state is State.UPLOADING:
            self._add_body(request, message.frames, message.complete, now_s)

    def client_gone(self, message: Abort) -> None:
        """Nobody waits for this request any more."""
        request = self.ledger.find(message.request_id)
        if request is not None and not request.cancelled:
            self._metrics.add("requests_total", outcome="client_closed")
            self._replies.cancel(request)

    def bytes_lost(self, message: ReadyBytes) -> None:
        """An API process is too far behind to be sent this: its streams cannot go on with a gap, so they end."""
        for request_id, status in zip(message.request_ids, message.statuses, strict=True):
            request = self.ledger.find(request_id)
            if request is not None and not request.cancelled:
                request.opened = request.opened and not status
                self._replies.fail(request, INTERNAL)

    # --- from tokenizer workers

    def accepted(self, worker: str, message: Accepted, now_s: float) -> None:
        """A body became token ids, which are on their way to the engine."""
        request = self._release(worker, message.request_id, message.attempt, now_s)
        if request is None:
            self._replies.abort_everywhere(message.request_id, message.attempt)
            return
        request.state = State.RUNNING
        request.body.clear()
        lost = request.undelivered or not self.ledger.is_placed(request)
        if not request.cancelled:
            self._take_prepared(request, message)
        elif not lost:
            self._replies.send(request.engine, Abort(request.request_id, request.attempt))
        if lost:
            self._recovery.park(request, "peer_lost", now_s)
            self._recovery.unpark(now_s)

    def rejected(self, worker: str, message: Rejected, now_s: float) -> None:
        """A body was invalid."""
        request = self._release(worker, message.request_id, message.attempt, now_s)
        if request is not None:
            self._replies.finish(request, "rejected", message.status, message.frames[0])

    def answered(self, worker: str, message: Answered, now_s: float) -> None:
        """A body needed no engine."""
        request = self._release(worker, message.request_id, message.attempt, now_s)
        if request is not None:
            self._replies.finish(request, "answered", 200, message.frames[0])

    # --- from any worker

    def hello(self, message: Hello, now_s: float) -> None:
        """A worker is connected and ready for work."""
        if self.ledger.is_dead(message.identity):
            return
        if message.role == Role.TOKENIZER:
            self._pool.add_worker(message.identity, _slot(message.identity), message.capacity)
        self.ledger.greet(message.role, message.identity)
        self._dispatch(now_s)

    def undelivered(self, message: Undelivered, now_s: float) -> None:
        """A worker could not hand requests on; a moment later the topology will have settled."""
        for request_id, attempt in zip(message.request_ids, message.attempts, strict=True):
            request = self.ledger.current(request_id, attempt)
            if request is None:
                self._replies.abort_everywhere(request_id, attempt)
            elif request.state is State.PREPARING:
                request.undelivered = True  # its Accepted is still on the way here
            elif request.state is State.RUNNING:
                request.num_losses += 1
                self._recovery.park(request, "undelivered", now_s)

    # --- from detokenizers

    def progress(self, message: Progress, now_s: float) -> None:
        """Journal what was consumed, pass the ready bytes on to the one API process that the rows belong to."""
        ids, ready = memoryview(message.frames[0]), message.frames[1]
        view = memoryview(ready)
        api = ""
        rows: list[tuple[str, int, int, int]] = []
        pieces: list[Buffer] = []
        id_start = byte_start = 0
        columns = zip(
            message.request_ids,
            message.attempts,
            message.choices,
            message.num_tokens,
            message.finish_reasons,
            message.statuses,
            message.flags,
            message.num_bytes,
            strict=True,
        )
        notes = _notes(message)
        for request_id, attempt, choice, num_tokens, finish_reason, status, flags, num_bytes in columns:
            note = next(notes, b"")
            id_end, byte_end = id_start + num_tokens * TOKEN_BYTES, byte_start + num_bytes
            request = self.ledger.current(request_id, attempt)
            if request is not None:
                self.ledger.record(request, choice, ids[id_start:id_end], finish_reason, note)
                if num_tokens and request.first_token_s is None and not request.cancelled:
                    request.first_token_s = now_s
                    self._metrics.observe("time_to_first_token_seconds", now_s - request.created_s)
                if finish_reason != FinishReason.RUNNING:
                    reason = FinishReason(finish_reason).name.lower()
                    self._metrics.add("request_success_total", finished_reason=reason)
                if flags & ReadyFlags.STOPPED:
                    self._replies.send(request.engine, Abort(request_id, attempt, choice))
                if not request.cancelled and (num_bytes or flags & ReadyFlags.LAST):
                    api = request.api
                    rows.append((request_id, self._replies.status(request, status), flags & _CLIENT_FLAGS, num_bytes))
                    pieces.append(view[byte_start:byte_end])
                if flags & ReadyFlags.LAST:
                    if not request.journal.is_finished:  # one choice failed, and all ended with it
                        self._replies.send(request.engine, Abort(request_id, attempt))
                    self._observe_end(request, now_s)
                    self._replies.end(request, "finished")
            elif not flags & ReadyFlags.LAST:
                self._replies.abort_everywhere(request_id, attempt)
            id_start, byte_start = id_end, byte_end
        self._metrics.add("generation_tokens_total", len(ids) // TOKEN_BYTES)
        if rows:
            payload = ready if byte_start == sum(row[3] for row in rows) else b"".join(pieces)
            request_ids, statuses, all_flags, sizes = zip(*rows, strict=True)
            self._replies.send(api, ReadyBytes(request_ids, statuses, all_flags, sizes, frames=(payload,)))
        self._recovery.unpark(now_s)  # a suspect may have been cleared

    def _observe_end(self, request: Request, now_s: float) -> None:
        self._metrics.observe("e2e_request_latency_seconds", now_s - request.created_s)
        num_tokens = max(map(len, request.journal.outputs), default=0) // TOKEN_BYTES
        if request.first_token_s is not None and num_tokens > 1 and not request.cancelled:
            pace_s = (now_s - request.first_token_s) / (num_tokens - 1)
            self._metrics.observe("time_per_output_token_seconds", pace_s)

    # --- from the supervisor and the clock

    def topology(self, topology: Topology, now_s: float, suspects: Collection[Assignment] = ()) -> None:
        """Whoever is missing is dead, and what it held begins again elsewhere.

        ``suspects``: what the dead tokenizer and detokenizer workers were working on when they died.
        """
        self._was_ready = self._was_ready or {peer.role for peer in topology.peers} == set(Role)
        self._recovery.recover(topology, suspects, now_s)
        self._dispatch(now_s)

    def tick(self, now_s: float) -> float:
        """Do what is due; returns the seconds until the next tick."""
        if now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + SWEEP_INTERVAL_S
            self._sweep(now_s)
        self._dispatch(now_s)
        return BUSY_TICK_S if self.ledger.parked or self._pool.num_waiting else IDLE_TICK_S

    def fail_all(self) -> None:
        """The router leaves: every client gets an error that it can read."""
        for request in self.ledger:
            if not request.cancelled:
                self._replies.fail(request, DRAINING)

    def report(self) -> None:
        """Bring the gauges up to date."""
        self._metrics.set("num_requests_unfinished", len(self.ledger))
        self._metrics.set("num_requests_queued", self._pool.num_waiting)
        self._metrics.set("num_requests_tokenizing", self._pool.num_in_flight)
        self._metrics.set("unfinished_bytes", self.ledger.held_bytes)

    # --- admission and dispatch

    def _reason_to_refuse(self, message: Submit) -> RequestError | None:
        if self.draining:
            return DRAINING
        if not self._was_ready:
            return NOT_READY
        settings = self._settings
        too_many = len(self.ledger) >= settings.max_unfinished_requests
        too_much = self.ledger.held_bytes + max(0, message.content_length) > settings.max_unfinished_bytes
        return OVERLOADED if too_many or too_much else None

    def _add_body(self, request: Request, frames: Iterable[Buffer], complete: bool, now_s: float) -> None:
        for frame in frames:
            request.body.append(frame)
            request.body_bytes += len(frame)
        self.ledger.hold(
            request, max(request.held_bytes, request.body_bytes + CHUNK_OVERHEAD_BYTES * len(request.body))
        )
        if complete:
            self._recovery.enqueue(request, now_s)
            self._dispatch(now_s)
        elif self.ledger.held_bytes > self._settings.max_unfinished_bytes:
            self._replies.fail(request, OVERLOADED)

    def _dispatch(self, now_s: float) -> None:
        """Let wait no longer who can go on: what is parked before what is new."""
        self._recovery.unpark(now_s)
        if not self.ledger.can_run:
            return
        for body, worker in self._pool.assign(now_s):
            request = self.ledger[body.request_id]
            request.attempt += 1
            request.state = State.PREPARING
            request.tokenizer = worker
            self.ledger.place_well(request)
            self._pool.confirm(worker, (request.request_id, request.attempt), body, now_s)
            prepare = Prepare(
                request_id=request.request_id,
                attempt=request.attempt,
                route=request.route,
                engine=request.engine,
                detokenizer=request.detokenizer,
                frames=tuple(request.body),
            )
            self._replies.send(worker, prepare)

    def _release(self, worker: str, request_id: str, attempt: int, now_s: float) -> Request | None:
        """Free a worker's place; the request, if this answer is still the one that is waited for."""
        self._pool.release(worker, (request_id, attempt))
        self._dispatch(now_s)
        return self.ledger.current(request_id, attempt)

    # --- time

    def _sweep(self, now_s: float) -> None:
        for request_id in self._pool.expire_queued(now_s - self._settings.queue_timeout_s):
            self._replies.fail(self.ledger[request_id], QUEUE_TIMEOUT)
        for worker, assignments in self._pool.expire_stalled(now_s):
            for request_id, attempt in assignments:
                self._replies.send(worker, Abort(request_id, attempt))
            self._recovery.recover_bodies(assignments, "tokenizer_stalled", now_s, assignments[:1])
        self._recovery.expire_parked(now_s, self._settings.queue_timeout_s)
        limit_s = now_s - self._settings.total_timeout_s
        for request in [item for item in self.ledger if item.created_s < limit_s]:
            if request.cancelled:
                self.ledger.remove(request)
            else:
                self._replies.fail(request, TOTAL_TIMEOUT)

    def _take_prepared(self, request: Request, message: Accepted) -> None:
        request.journal.prepared = tuple(message.frames)
        request.journal.grow(message.num_choices)
        self.ledger.hold(request, sum(map(len, (*message.frames, *request.journal.outputs, *request.journal.notes))))
        self._metrics.add("prompt_tokens_total", message.num_prompt_tokens)
        self._metrics.observe("request_prompt_tokens", message.num_prompt_tokens)
        if message.stream and not request.opened:
            self._replies.open_stream(request)


def _notes(message: Progress) -> Iterator[Buffer]:
    """The note of each row, where any row has one."""
    end = 0
    for size in message.num_note_bytes:
        start, end = end, end + size
        yield memoryview(message.frames[2])[start:end]


def _slot(identity: str) -> int:
    return int(identity.split(".")[1])
