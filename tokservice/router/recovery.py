"""How requests go on whose worker died, hangs, or lost a message. Pure.

Bodies go to another tokenizer worker. Running requests begin again from their journal, at a living engine and
detokenizer; while there is none that they may join they are parked.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from tokservice.router.ledger import Ledger
from tokservice.router.placement import MAX_DEATHS
from tokservice.router.replies import Replies
from tokservice.router.request import Request, State
from tokservice.router.tokenizer_pool import Assignment, TokenizerPool
from tokservice.runtime.metrics import Metrics
from tokservice.wire.errors import ENGINE_FAILED, POISON, QUEUE_TIMEOUT
from tokservice.wire.messages import Abort, Topology

MAX_BODY_DEATHS = 2  # a body that killed so many workers is not tried again
MAX_LOSSES = 3  # without a new token: ids that cannot be handed on to living workers are not well-formed
LOSS_PAUSE_S = 0.01  # then the topology will have settled


class Recovery:
    """Further attempts at requests in the ledger."""

    def __init__(self, ledger: Ledger, pool: TokenizerPool, replies: Replies, metrics: Metrics) -> None:
        self._ledger = ledger
        self._pool = pool
        self._replies = replies
        self._metrics = metrics
        self._had_workers_s = -math.inf

    def recover(self, topology: Topology, suspects: Collection[Assignment], now_s: float) -> None:
        """Whoever is missing is dead, and what it held begins again elsewhere.

        ``suspects``: what the dead tokenizer and detokenizer workers were working on when they died.
        """
        dead = self._ledger.deaths({peer.identity for peer in topology.peers})
        for identity in dead:
            self.recover_bodies(self._pool.remove_worker(identity), "tokenizer_died", now_s, suspects)
        for request in self._ledger:
            if request.api in dead:
                self._replies.cancel(request)
            if request.state is State.RUNNING:
                lost = {request.engine, request.detokenizer} & dead.keys()
                # A worker that died between Accepted and Generate: whether the ids were sent cannot be known.
                unsure = request.tokenizer in dead and not request.has_output
                if lost or unsure:
                    killed = lost.difference(topology.left)
                    to_blame = False
                    if request.engine in killed:
                        request.num_engine_deaths += 1
                        to_blame = request.num_engine_deaths >= MAX_DEATHS and dead[request.engine] == 1
                    if request.detokenizer in killed and (request.request_id, request.attempt) in suspects:
                        request.num_detokenizer_deaths += 1
                        to_blame |= request.num_detokenizer_deaths >= MAX_DEATHS
                    self.park(request, "worker_died", now_s, to_blame=to_blame)

    # --- bodies

    def enqueue(self, request: Request, now_s: float) -> None:
        """Let a body wait for a tokenizer worker, for the first time or again."""
        request.state = State.QUEUED
        is_suspect = request.num_body_deaths > 0
        self._pool.enqueue(request.request_id, request.body_bytes, now_s, is_suspect=is_suspect)

    def recover_bodies(
        self, assignments: Iterable[Assignment], reason: str, now_s: float, suspects: Collection[Assignment]
    ) -> None:
        """Bodies that a dead or stalled tokenizer worker had."""
        for request_id, attempt in assignments:
            request = self._ledger.current(request_id, attempt)
            if request is None:
                continue
            if request.cancelled:
                self._ledger.remove(request)
            elif request.has_output:
                request.state = State.RUNNING  # its ids had been sent; only the notice of it is late or lost
            else:
                request.num_body_deaths += (request_id, attempt) in suspects
                self._prepare_again(request, reason, now_s)

    def _prepare_again(self, request: Request, reason: str, now_s: float) -> None:
        self._give_up_attempt(request)
        if request.num_body_deaths >= MAX_BODY_DEATHS:
            self._replies.fail(request, POISON)
        else:
            self._metrics.add("request_retries_total", reason=reason)
            self.enqueue(request, now_s)

    # --- running requests

    def park(self, request: Request, reason: str, now_s: float, *, to_blame: bool = False) -> None:
        """Stop a running request, to begin it again from its journal as soon as somebody may run it.

        ``to_blame``: it is what ended its worker, and has done so often enough.
        """
        self._give_up_attempt(request)
        if request.cancelled:
            self._ledger.remove(request)
        elif to_blame or not request.journal.prepared or request.num_losses >= MAX_LOSSES:
            self._replies.fail(request, ENGINE_FAILED)
        else:
            self._metrics.add("request_retries_total", reason=reason)
            request.parked_s = now_s
            self._ledger.parked[request.request_id] = request

    def unpark(self, now_s: float) -> None:
        """Begin what is parked, with the next attempt; suspects first, so that others do not fill what they need."""
        parked = self._ledger.parked.values() if self._ledger.can_run else ()
        for request in sorted(parked, key=lambda request: request.num_engine_deaths, reverse=True):
            if request.num_losses and now_s - request.parked_s < LOSS_PAUSE_S:
                continue
            if self._ledger.place_well(request):
                del self._ledger.parked[request.request_id]
                request.state = State.RUNNING
                generate = request.journal.generate(request.request_id, request.attempt, request.detokenizer)
                self._replies.send(request.engine, generate)
            elif not self._ledger.can_run:
                return

    def expire_parked(self, now_s: float, timeout_s: float) -> None:
        """Give up what has waited so long for an engine or detokenizer that lives; those that only wait for their turn
        wait as in an engine."""
        if self._ledger.has_workers:
            self._had_workers_s = now_s
        for request in list(self._ledger.parked.values()):
            if now_s - max(request.parked_s, self._had_workers_s) > timeout_s:
                self._replies.fail(request, QUEUE_TIMEOUT)

    def _give_up_attempt(self, request: Request) -> None:
        """From now on nothing of it counts, whoever it still comes from; the request is at no worker."""
        for worker, living in (
            (request.engine, self._ledger.engines),
            (request.detokenizer, self._ledger.detokenizers),
        ):
            if worker in living:  # a dead tokenizer may have sent the ids before its word could be read
                self._replies.send(worker, Abort(request.request_id, request.attempt))
        self._ledger.place(request, "", "")
        request.attempt += 1
        request.state = State.PARKED
        request.tokenizer = ""
        request.has_output = request.undelivered = False
