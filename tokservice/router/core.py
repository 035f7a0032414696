"""The router's decisions. Pure: messages and the time in, messages out; no sockets, no clock, no body parsed.

It knows every unfinished request: where it is, its attempt, its journal. It admits, assigns, passes results
on, aborts, and begins requests again whose worker died. What is to be sent is appended to ``outbox`` as
(identity, message).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from tokservice.router.ledger import Ledger
from tokservice.router.request import Journal, Request, State
from tokservice.router.tokenizer_pool import Assignment, TokenizerPool, Waiting
from tokservice.runtime.config import RouterConfig
from tokservice.runtime.metrics import Metrics
from tokservice.wire.codec import TOKEN_BYTES
from tokservice.wire.errors import (
    DRAINING,
    ENGINE_FAILED,
    INTERNAL,
    NOT_READY,
    OVERLOADED,
    POISON,
    QUEUE_TIMEOUT,
    TOTAL_TIMEOUT,
    RequestError,
    sse_error,
)
from tokservice.wire.messages import (
    Abort,
    Accepted,
    Answered,
    BodyChunk,
    Buffer,
    FinishReason,
    Hello,
    Message,
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

MAX_BODY_DEATHS = 2  # a body that killed so many workers is not tried again
MAX_DEATHS_WITHOUT_TOKEN = 3  # of one kind: a request that ends its worker ends the same kind each time
CHUNK_OVERHEAD_BYTES = 256  # what a piece of body costs beside its bytes
BUSY_TICK_S = 0.02
IDLE_TICK_S = 0.5
SWEEP_INTERVAL_S = 1.0
_CLIENT_FLAGS = ReadyFlags.STREAM | ReadyFlags.LAST


class RouterCore:
    """See the module's docstring. ``now_s`` is monotonic and in seconds throughout."""

    def __init__(self, settings: RouterConfig, num_tokenizers: int, metrics: Metrics) -> None:
        self.outbox: list[tuple[str, Message]] = []
        self.draining = False
        self._settings = settings
        self._metrics = metrics
        self._pool = TokenizerPool(num_tokenizers, settings.long_wait_s)
        self.ledger = Ledger()
        self._was_ready = False
        self._parked: dict[str, Request] = {}
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
            self._answer(api, message.request_id, error.status, error.body(message.route))
            return
        request = Request(message.request_id, api, message.route, now_s)
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
            self._cancel(request)

    def bytes_lost(self, message: ReadyBytes) -> None:
        """An API process is too far behind to be sent this: its streams cannot go on with a gap, so they end."""
        for request_id, status in zip(message.request_ids, message.statuses, strict=True):
            request = self.ledger.find(request_id)
            if request is not None and not request.cancelled:
                request.opened = request.opened and not status
                self._fail(request, INTERNAL)

    # --- from tokenizer workers

    def accepted(self, worker: str, message: Accepted, now_s: float) -> None:
        """A body became token ids, which are on their way to the engine."""
        request = self._release(worker, message.request_id, message.attempt, now_s)
        if request is None:
            self._abort_everywhere(message.request_id, message.attempt)
            return
        request.state = State.RUNNING
        request.body.clear()
        lost = request.undelivered or not self.ledger.is_placed(request)
        if not request.cancelled:
            self._take_prepared(request, message)
        elif not lost:
            self._send(request.engine, Abort(request.request_id, request.attempt))
        if lost:
            self._begin_again(request, "peer_lost")

    def rejected(self, worker: str, message: Rejected, now_s: float) -> None:
        """A body was invalid."""
        request = self._release(worker, message.request_id, message.attempt, now_s)
        if request is not None:
            self._finish(request, "rejected", message.status, message.frames[0])

    def answered(self, worker: str, message: Answered, now_s: float) -> None:
        """A body needed no engine."""
        request = self._release(worker, message.request_id, message.attempt, now_s)
        if request is not None:
            self._finish(request, "answered", 200, message.frames[0])

    # --- from any worker

    def hello(self, message: Hello, now_s: float) -> None:
        """A worker is connected and ready for work."""
        if self.ledger.is_dead(message.identity):
            return
        if message.role == Role.TOKENIZER:
            self._pool.add_worker(message.identity, _slot(message.identity), message.capacity)
        self.ledger.greet(message.role, message.identity)
        self._unpark()
        self._dispatch(now_s)

    def undelivered(self, message: Undelivered) -> None:
        """A worker could not hand requests on; a moment later the topology will have settled."""
        for request_id, attempt in zip(message.request_ids, message.attempts, strict=True):
            request = self.ledger.current(request_id, attempt)
            if request is None:
                self._abort_everywhere(request_id, attempt)
            elif request.state is State.PREPARING:
                request.undelivered = True  # its Accepted is still on the way here
            elif request.state is State.RUNNING:
                request.deaths["undelivered"] += 1
                self._park(request)

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
                if finish_reason != FinishReason.RUNNING:
                    reason = FinishReason(finish_reason).name.lower()
                    self._metrics.add("request_success_total", finished_reason=reason)
                if flags & ReadyFlags.STOPPED:
                    self._send(request.engine, Abort(request_id, attempt, choice))
                if not request.cancelled and (num_bytes or flags & ReadyFlags.LAST):
                    api = request.api
                    rows.append((request_id, self._status(request, status, now_s), flags & _CLIENT_FLAGS, num_bytes))
                    pieces.append(view[byte_start:byte_end])
                if flags & ReadyFlags.LAST:
                    self._metrics.observe("e2e_request_latency_seconds", now_s - request.created_s)
                    self._end(request, "finished")
            elif not flags & ReadyFlags.LAST:
                self._abort_everywhere(request_id, attempt)
            id_start, byte_start = id_end, byte_end
        self._metrics.add("generation_tokens_total", len(ids) // TOKEN_BYTES)
        if rows:
            payload = ready if byte_start == sum(row[3] for row in rows) else b"".join(pieces)
            request_ids, statuses, all_flags, sizes = zip(*rows, strict=True)
            self._send(api, ReadyBytes(request_ids, statuses, all_flags, sizes, frames=(payload,)))

    # --- from the supervisor and the clock

    def topology(self, topology: Topology, now_s: float, suspects: Collection[Assignment] = ()) -> None:
        """Whoever is missing is dead, and what it held begins again elsewhere.

        ``suspects``: what the dead tokenizer workers were working on when they died.
        """
        living = {peer.identity for peer in topology.peers}
        self._was_ready = self._was_ready or {peer.role for peer in topology.peers} == set(Role)
        dead = self.ledger.deaths(living)
        for identity in dead:
            self._recover_bodies(self._pool.remove_worker(identity), "tokenizer_died", now_s, suspects)
        for request in self.ledger:
            if request.api in dead:
                self._cancel(request)
            if request.state is State.RUNNING:
                lost = {request.engine, request.detokenizer} & dead
                # A worker that died between Accepted and Generate: whether the ids were sent cannot be known.
                unsure = request.tokenizer in dead and not request.has_output
                if lost or unsure:
                    request.deaths.update(_role(identity) for identity in lost.difference(topology.left))
                    self._begin_again(request, "worker_died")
        self._dispatch(now_s)

    def tick(self, now_s: float) -> float:
        """Do what is due; returns the seconds until the next tick."""
        self._unpark()
        if now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + SWEEP_INTERVAL_S
            self._sweep(now_s)
        self._dispatch(now_s)
        return BUSY_TICK_S if self._parked or self._pool.num_waiting else IDLE_TICK_S

    def fail_all(self) -> None:
        """The router leaves: every client gets an error that it can read."""
        for request in self.ledger:
            if not request.cancelled:
                self._fail(request, DRAINING)

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
            request.state = State.QUEUED
            self._enqueue(request, now_s)
            self._dispatch(now_s)
        elif self.ledger.held_bytes > self._settings.max_unfinished_bytes:
            self._fail(request, OVERLOADED)

    def _enqueue(self, request: Request, now_s: float) -> None:
        exclusive = request.num_body_deaths > 0 or request.body_bytes > self._settings.long_body_bytes
        self._pool.enqueue(Waiting(request.request_id, request.body_bytes, exclusive, now_s))

    def _dispatch(self, now_s: float) -> None:
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
            self._send(worker, prepare)

    def _release(self, worker: str, request_id: str, attempt: int, now_s: float) -> Request | None:
        """Free a worker's place; the request, if this answer is still the one that is waited for."""
        self._pool.release(worker, (request_id, attempt))
        self._dispatch(now_s)
        return self.ledger.current(request_id, attempt)

    # --- recovery

    def _recover_bodies(
        self, assignments: Iterable[Assignment], reason: str, now_s: float, suspects: Collection[Assignment]
    ) -> None:
        """Bodies that a dead or stalled tokenizer worker had."""
        for request_id, attempt in assignments:
            request = self.ledger.current(request_id, attempt)
            if request is None:
                continue
            if request.cancelled:
                self._remove(request)
            elif request.has_output:
                request.state = State.RUNNING  # its ids had been sent; only the notice of it is late or lost
            else:
                request.num_body_deaths += (request_id, attempt) in suspects
                self._prepare_again(request, reason, now_s)

    def _prepare_again(self, request: Request, reason: str, now_s: float) -> None:
        """Give the body to another tokenizer worker."""
        self._give_up_attempt(request)
        request.state = State.QUEUED
        if request.num_body_deaths >= MAX_BODY_DEATHS:
            self._fail(request, POISON)
        else:
            self._metrics.add("request_retries_total", reason=reason)
            self._enqueue(request, now_s)

    def _begin_again(self, request: Request, reason: str) -> None:
        """Send the journal to a living engine, with the next attempt."""
        self._give_up_attempt(request)
        if request.cancelled:
            self._remove(request)
        elif not request.journal.prepared or max(request.deaths.values(), default=0) >= MAX_DEATHS_WITHOUT_TOKEN:
            self._fail(request, ENGINE_FAILED)
        elif not self.ledger.can_run:
            self._parked[request.request_id] = request
        else:
            self._metrics.add("request_retries_total", reason=reason)
            self.ledger.place_well(request)
            request.state = State.RUNNING
            generate = request.journal.generate(request.request_id, request.attempt, request.detokenizer)
            self._send(request.engine, generate)

    def _park(self, request: Request) -> None:
        self._give_up_attempt(request)
        if request.cancelled:
            self._remove(request)
        else:
            self._parked[request.request_id] = request

    def _give_up_attempt(self, request: Request) -> None:
        """From now on nothing of it counts, whoever it still comes from; the request is at no worker."""
        for worker, living in (
            (request.engine, self.ledger.engines),
            (request.detokenizer, self.ledger.detokenizers),
        ):
            if worker in living:  # a dead tokenizer may have sent the ids before its word could be read
                self._send(worker, Abort(request.request_id, request.attempt))
        self.ledger.place(request, "", "")
        request.attempt += 1
        request.state = State.PARKED
        request.tokenizer = ""
        request.has_output = request.undelivered = False

    def _unpark(self) -> None:
        if self._parked and self.ledger.can_run:
            parked, self._parked = self._parked, {}
            for request in parked.values():
                self._begin_again(request, "parked")

    # --- ends

    def _sweep(self, now_s: float) -> None:
        for request_id in self._pool.expire_queued(now_s - self._settings.queue_timeout_s):
            self._fail(self.ledger[request_id], QUEUE_TIMEOUT)
        for worker, assignments in self._pool.expire_stalled(now_s):
            for request_id, attempt in assignments:
                self._send(worker, Abort(request_id, attempt))
            self._recover_bodies(assignments, "tokenizer_stalled", now_s, assignments[:1])
        limit_s = now_s - self._settings.total_timeout_s
        for request in [item for item in self.ledger if item.created_s < limit_s]:
            if request.cancelled:
                self._remove(request)
            else:
                self._fail(request, TOTAL_TIMEOUT)

    def _cancel(self, request: Request) -> None:
        """Nobody waits: stop the work, and keep a tombstone while a worker still has it."""
        abort = Abort(request.request_id, request.attempt)
        match request.state:
            case State.PREPARING:
                self._send(request.tokenizer, abort)
            case State.RUNNING:
                self._send(request.engine, abort)
            case _:
                self._pool.withdraw(request.request_id)
                self._remove(request)
                return
        request.cancelled = True
        request.journal = Journal()
        request.body.clear()
        self.ledger.hold(request, 0)

    def _finish(self, request: Request, outcome: str, status: int, body: Buffer) -> None:
        if not request.cancelled:
            self._answer(request.api, request.request_id, status, body)
        self._end(request, outcome)

    def _fail(self, request: Request, error: RequestError) -> None:
        """End a request with an error that its client can read, and stop its work."""
        self._metrics.add("requests_total", outcome=error.code or "failed")
        if request.opened:
            self._answer(request.api, request.request_id, 0, sse_error(error, request.route))
        else:
            self._answer(request.api, request.request_id, error.status, error.body(request.route))
        self._cancel(request)

    def _end(self, request: Request, outcome: str) -> None:
        if not request.cancelled:
            self._metrics.add("requests_total", outcome=outcome)
        self._remove(request)

    def _remove(self, request: Request) -> None:
        self._parked.pop(request.request_id, None)
        self.ledger.remove(request)

    def _take_prepared(self, request: Request, message: Accepted) -> None:
        request.journal.prepared = tuple(message.frames)
        request.journal.grow(message.num_choices)
        self.ledger.hold(request, sum(map(len, (*message.frames, *request.journal.outputs, *request.journal.notes))))
        self._metrics.add("prompt_tokens_total", message.num_prompt_tokens)
        self._metrics.observe("request_prompt_tokens", message.num_prompt_tokens)
        if message.stream and not request.opened:
            self._open_stream(request)

    # --- sending

    def _send(self, to: str, message: Message) -> None:
        if to:
            self.outbox.append((to, message))

    def _answer(self, api: str, request_id: str, status: int, body: Buffer) -> None:
        self._send(api, ReadyBytes((request_id,), (status,), (ReadyFlags.LAST,), (len(body),), frames=(body,)))

    def _open_stream(self, request: Request) -> None:
        request.opened = True
        self._send(request.api, ReadyBytes((request.request_id,), (200,), (ReadyFlags.STREAM,), (0,), frames=(b"",)))

    def _status(self, request: Request, status: int, now_s: float) -> int:
        """The status with which a row goes out: 0 where it only continues its response."""
        if not request.has_text:
            request.has_text = True
            self._metrics.observe("time_to_first_token_seconds", now_s - request.created_s)
        if request.opened:
            return 0
        request.opened = True
        return status or 200

    def _abort_everywhere(self, request_id: str, attempt: int) -> None:
        """An attempt that nobody waits for may be running anywhere."""
        for worker in (*self.ledger.engines, *self.ledger.detokenizers):
            self._send(worker, Abort(request_id, attempt))


def _notes(message: Progress) -> Iterator[Buffer]:
    """The note of each row, where any row has one."""
    end = 0
    for size in message.num_note_bytes:
        start, end = end, end + size
        yield memoryview(message.frames[2])[start:end]


def _role(identity: str) -> str:
    return identity.split(".")[0]


def _slot(identity: str) -> int:
    return int(identity.split(".")[1])
