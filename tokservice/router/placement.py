"""Which engine, or which detokenizer, a request is given to. Pure.

Each goes to the worker of a kind that has the fewest, but for two kinds. Requests of one conversation go to the same
engine while that is not much busier than others. And there are suspects: requests that have seen too many workers of
this kind die since their last new token. They are tried one at a time, apart from those that are not suspect, on a
worker that nobody joins until the one on trial has given a token. Those that were tried before and gave one are the
only company; after one more death there is none at all. What ends a worker that was never given anything else is to
blame for it; of any other worker, an attempt that was given up may still have been there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b

from tokservice.router.request import Request

SUSPECT_DEATHS = 2  # without a new token: from now on it is tried apart from others
MAX_DEATHS = 3  # at which it is given up, if it is to blame for the last one

MAX_SURPLUS = 4  # requests that a conversation's engine may have above others; with more it is not worth its cache


class Workers:
    """The living workers of one kind, ``engine`` or ``detokenizer``, and how many requests each has."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.loads: Counter[str] = Counter()
        self._num_given: Counter[str] = Counter()  # requests that each was ever given
        self._wards: dict[str, Request] = {}  # workers kept for trials, and whom each tries, or tried last

    def __contains__(self, identity: str) -> bool:
        return identity in self.loads

    def __iter__(self) -> Iterator[str]:
        return iter(self.loads)

    @property
    def can_take(self) -> bool:
        """Whether there is a worker that a request may join."""
        return any(not self._is_trying(identity) for identity in self.loads)

    def greet(self, identity: str) -> None:
        """A worker is ready for work."""
        self.loads.setdefault(identity, 0)

    def bury(self, identity: str) -> int:
        """A worker is dead. Returns how many requests it was ever given."""
        self._wards.pop(identity, None)
        self.loads.pop(identity, None)
        return self._num_given.pop(identity, 0)

    def choose(self, request: Request) -> str:
        """The worker for a request; '' if it has to wait."""
        free = {identity: load for identity, load in self.loads.items() if not self._is_trying(identity)}
        if self.suspects(request):
            alone = request.deaths[self.kind] >= MAX_DEATHS
            free = {
                identity: load for identity, load in free.items() if not load or (identity in self._wards and not alone)
            }
        elif request.session and self.kind == "engine" and free:
            home = max(free, key=lambda identity: _rank(request.session, identity))
            if free[home] <= min(free.values()) + MAX_SURPLUS:
                return home
        return min(free, key=free.__getitem__, default="")

    def move(self, request: Request, old: str, new: str) -> None:
        """A request leaves a worker and joins another; '' and the dead are nobody."""
        if old in self.loads:
            self.loads[old] -= 1
        if new in self.loads:
            self.loads[new] += 1
            self._num_given[new] += 1
            if self.suspects(request):
                self._wards[new] = request
            else:
                self._wards.pop(new, None)

    def suspects(self, request: Request) -> bool:
        """Whether the request may be what ends workers of this kind."""
        return request.deaths[self.kind] >= SUSPECT_DEATHS

    def _is_trying(self, identity: str) -> bool:
        suspect = self._wards.get(identity)
        if suspect is None or suspect.cancelled or not self.suspects(suspect):
            return False
        return identity in (suspect.engine, suspect.detokenizer)


def _rank(session: str, identity: str) -> bytes:
    """Rendezvous hashing (Thaler and Ravishankar, 1998): where an engine comes or goes, only its own sessions move."""
    return blake2b(f"{session} {identity}".encode(), digest_size=8).digest()
