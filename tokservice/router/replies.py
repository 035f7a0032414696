"""What leaves the router, and how requests end. Pure: messages are appended to ``outbox`` as (identity, message)."""

from __future__ import annotations

from tokservice.router.ledger import Ledger
from tokservice.router.request import Journal, Request, State
from tokservice.router.tokenizer_pool import TokenizerPool
from tokservice.runtime.metrics import Metrics
from tokservice.wire.errors import RequestError, sse_error
from tokservice.wire.messages import Abort, Buffer, Message, ReadyBytes, ReadyFlags


class Replies:
    """Answers to clients, and the ends that take a request out of the ledger."""

    def __init__(self, ledger: Ledger, pool: TokenizerPool, metrics: Metrics) -> None:
        self.outbox: list[tuple[str, Message]] = []
        self._ledger = ledger
        self._pool = pool
        self._metrics = metrics

    # --- sending

    def send(self, to: str, message: Message) -> None:
        """To any process; '' is nobody."""
        if to:
            self.outbox.append((to, message))

    def answer(self, api: str, request_id: str, status: int, body: Buffer) -> None:
        """The one, or the last, piece of a response."""
        self.send(api, ReadyBytes((request_id,), (status,), (ReadyFlags.LAST,), (len(body),), frames=(body,)))

    def open_stream(self, request: Request) -> None:
        """Status and headers of a stream."""
        request.opened = True
        self.send(request.api, ReadyBytes((request.request_id,), (200,), (ReadyFlags.STREAM,), (0,), frames=(b"",)))

    def status(self, request: Request, status: int) -> int:
        """The status with which a row goes out: 0 where it only continues its response."""
        if request.opened:
            return 0
        request.opened = True
        return status or 200

    def abort_everywhere(self, request_id: str, attempt: int) -> None:
        """An attempt that nobody waits for may be running anywhere."""
        for worker in (*self._ledger.engines, *self._ledger.detokenizers):
            self.send(worker, Abort(request_id, attempt))

    # --- ends

    def finish(self, request: Request, outcome: str, status: int, body: Buffer) -> None:
        """End a request with its whole response."""
        if not request.cancelled:
            self.answer(request.api, request.request_id, status, body)
        self.end(request, outcome)

    def fail(self, request: Request, error: RequestError) -> None:
        """End a request with an error that its client can read, and stop its work."""
        self._metrics.add("requests_total", outcome=error.code or "failed")
        if request.opened:
            self.answer(request.api, request.request_id, 0, sse_error(error, request.route))
        else:
            self.answer(request.api, request.request_id, error.status, error.body(request.route))
        self.cancel(request)

    def cancel(self, request: Request) -> None:
        """Nobody waits: stop the work, and keep a tombstone while a worker still has it."""
        abort = Abort(request.request_id, request.attempt)
        match request.state:
            case State.PREPARING:
                self.send(request.tokenizer, abort)
            case State.RUNNING:
                self.send(request.engine, abort)
            case _:
                self._pool.withdraw(request.request_id)
                self._ledger.remove(request)
                return
        request.cancelled = True
        request.journal = Journal()
        request.body.clear()
        self._ledger.hold(request, 0)

    def end(self, request: Request, outcome: str) -> None:
        """Everything was said, and no worker has it any more."""
        if not request.cancelled:
            self._metrics.add("requests_total", outcome=outcome)
        self._ledger.remove(request)
