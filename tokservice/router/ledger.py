"""The unfinished requests, what they weigh, and which workers live. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tokservice.router.placement import Engines, Workers
from tokservice.router.request import Request
from tokservice.wire.messages import Buffer, Role

MAX_DEAD = 256  # identities whose last messages may still arrive


class Ledger:
    """One record for each unfinished request; the bytes that they hold; the engines and detokenizers."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self.engines = Engines()
        self.detokenizers = Workers()
        self.parked: dict[str, Request] = {}  # those that wait for an engine and a detokenizer
        self._requests: dict[str, Request] = {}
        self._living: set[str] = set()  # identities in the last topology
        self._dead: deque[str] = deque(maxlen=MAX_DEAD)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """A snapshot: requests may be removed meanwhile."""
        return iter(list(self._requests.values()))

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    # --- requests

    def add(self, request: Request) -> None:
        """A request begins."""
        self._requests[request.request_id] = request

    def find(self, request_id: str) -> Request | None:
        """The record, if the request is unfinished."""
        return self._requests.get(request_id)

    def current(self, request_id: str, attempt: int) -> Request | None:
        """The record, if this attempt is the one that counts."""
        request = self._requests.get(request_id)
        return request if request is not None and request.attempt == attempt else None

    def remove(self, request: Request) -> None:
        """A request has ended, and nobody works on it any more."""
        self.place(request, "", "")
        self.hold(request, 0)
        self.parked.pop(request.request_id, None)
        self._requests.pop(request.request_id, None)

    def hold(self, request: Request, num_bytes: int) -> None:
        """Set what a request counts for in admission."""
        self.held_bytes += num_bytes - request.held_bytes
        request.held_bytes = num_bytes

    def record(self, request: Request, choice: int, ids: Buffer, finish_reason: int, note: Buffer) -> None:
        """Journal what a detokenizer consumed for a choice."""
        request.has_output = True
        if len(ids):
            request.num_engine_deaths = request.num_detokenizer_deaths = request.num_losses = 0
        if not request.cancelled:
            request.journal.record(choice, ids, finish_reason, note)
            self.hold(request, request.held_bytes + len(ids) + len(note))

    # --- workers

    @property
    def can_run(self) -> bool:
        """Whether there is an engine and a detokenizer that a request may join."""
        return self.engines.can_take and self.detokenizers.can_take

    @property
    def has_workers(self) -> bool:
        """Whether an engine and a detokenizer live."""
        return bool(self.engines.loads and self.detokenizers.loads)

    def greet(self, role: int, identity: str) -> None:
        """An engine or a detokenizer is ready for work."""
        if role == Role.ENGINE:
            self.engines.greet(identity)
        elif role == Role.DETOKENIZER:
            self.detokenizers.greet(identity)

    def deaths(self, living: set[str]) -> dict[str, int]:
        """Who has died, now that these live, and how many requests an engine among them was ever given."""
        dead = self._living - living
        self._living = living
        self._dead.extend(dead)
        num_given = {identity: self.engines.num_given(identity) for identity in dead}
        for identity in dead:
            self.engines.bury(identity)
            self.detokenizers.bury(identity)
        return num_given

    def is_dead(self, identity: str) -> bool:
        """Whether a message comes from a process that has died since it sent it."""
        return identity in self._dead

    def is_placed(self, request: Request) -> bool:
        """Whether its engine and its detokenizer live."""
        return request.engine in self.engines and request.detokenizer in self.detokenizers

    def place_well(self, request: Request) -> bool:
        """Give a request to an engine and a detokenizer; False if it has to wait for one."""
        engine, detokenizer = self.engines.choose(request), self.detokenizers.choose(request)
        if not engine or not detokenizer:
            return False
        self.place(request, engine, detokenizer)
        return True

    def place(self, request: Request, engine: str, detokenizer: str) -> None:
        """Move a request's weight to an engine and a detokenizer ('' for none)."""
        self.engines.move(request, request.engine, engine)
        self.detokenizers.move(request, request.detokenizer, detokenizer)
        request.engine, request.detokenizer = engine, detokenizer
