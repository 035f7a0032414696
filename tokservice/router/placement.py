"""Which engine and which detokenizer a request is given to. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b

from tokservice.router.request import Request

SUSPECT_DEATHS = 2  # of engines, without a new token: from now on a request is tried apart from others
MAX_DEATHS = 3  # at which it is given up, if it is to blame for the last one

MAX_SURPLUS = 4  # requests that a conversation's engine may have above others; with more it is not worth its cache


class Workers:
    """The living workers of one kind, and how many requests each has. The one that has the fewest gets the next."""

    def __init__(self) -> None:
        self.loads: Counter[str] = Counter()

    def __contains__(self, identity: str) -> bool:
        return identity in self.loads

    def __iter__(self) -> Iterator[str]:
        return iter(self.loads)

    @property
    def can_take(self) -> bool:
        """Whether there is a worker that a request may join."""
        return bool(self.loads)

    def greet(self, identity: str) -> None:
        """A worker is ready for work."""
        self.loads.setdefault(identity, 0)

    def bury(self, identity: str) -> None:
        """A worker is dead."""
        self.loads.pop(identity, None)

    def choose(self, request: Request) -> str:
        """The worker for a request; '' if it has to wait."""
        del request
        return min(self.loads, key=self.loads.__getitem__, default="")

    def move(self, request: Request, old: str, new: str) -> None:
        """A request leaves a worker and joins another; '' and the dead are nobody."""
        del request
        if old in self.loads:
            self.loads[old] -= 1
        if new in self.loads:
            self.loads[new] += 1


class Engines(Workers):
    """Requests of one conversation go to the same engine while that is not much busier than others.

    An engine works on many requests in one step, and cannot tell which of them ends it. So suspects, those that have
    seen too many engines die since their last new token, are tried one at a time, apart from those that are not
    suspect, on an engine that nobody joins until the one on trial has given a token. Those that were tried before and
    gave one are the only company; after one more death there is none at all. What ends an engine that was never given
    anything else is to blame for it; of any other engine, an attempt that was given up may still have been there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_given: Counter[str] = Counter()  # requests that each was ever given
        self._wards: dict[str, Request] = {}  # engines kept for trials, and whom each tries, or tried last

    @property
    def can_take(self) -> bool:
        """See ``Workers``."""
        return any(not self._is_trying(identity) for identity in self.loads)

    def num_given(self, identity: str) -> int:
        """How many requests a living engine was ever given."""
        return self._num_given[identity]

    def bury(self, identity: str) -> None:
        """See ``Workers``."""
        super().bury(identity)
        self._wards.pop(identity, None)
        self._num_given.pop(identity, None)

    def choose(self, request: Request) -> str:
        """See ``Workers``."""
        free = {identity: load for identity, load in self.loads.items() if not self._is_trying(identity)}
        if _is_suspect(request):
            alone = request.num_engine_deaths >= MAX_DEATHS
            free = {
                identity: load for identity, load in free.items() if not load or (identity in self._wards and not alone)
            }
        elif request.session and free:
            home = max(free, key=lambda identity: _rank(request.session, identity))
            if free[home] <= min(free.values()) + MAX_SURPLUS:
                return home
        return min(free, key=free.__getitem__, default="")

    def move(self, request: Request, old: str, new: str) -> None:
        """See ``Workers``."""
        super().move(request, old, new)
        if new in self.loads:
            self._num_given[new] += 1
            if _is_suspect(request):
                self._wards[new] = request
            else:
                self._wards.pop(new, None)

    def _is_trying(self, identity: str) -> bool:
        suspect = self._wards.get(identity)
        if suspect is None or suspect.cancelled or not _is_suspect(suspect):
            return False
        return suspect.engine == identity


def _is_suspect(request: Request) -> bool:
    return request.num_engine_deaths >= SUSPECT_DEATHS


def _rank(session: str, identity: str) -> bytes:
    """Rendezvous hashing (Thaler and Ravishankar, 1998): where an engine comes or goes, only its own sessions move."""
    return blake2b(f"{session} {identity}".encode(), digest_size=8).digest()
