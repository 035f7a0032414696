"""Steps of requests that take long take turns. Detokenizer worker; pure: no socket, no clock.

A step is the work on one message about a request. Most are done at once. One that is not waits, and with it all later
ones of its request, whose order counts. A turn is a slice of one request's work: whoever has something short to do
waits for one slice at most, however many have something long.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from tokservice.detokenizer.respond import Fed, Work
from tokservice.wire.messages import FinishReason

STEPS_AT_ONCE = 16  # short ones that waited behind a long one


class Step(NamedTuple):
    """Work of a ``Responder``, and what it is about."""

    work: Work
    token_ids: Sequence[int] = ()
    finish_reason: FinishReason = FinishReason.RUNNING


class Turns:
    """The requests whose steps wait."""

    def __init__(self) -> None:
        self._steps: OrderedDict[str, deque[Step]] = OrderedDict()  # the next turn is the first one's

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._steps

    @property
    def num_steps(self) -> int:
        """That wait."""
        return sum(map(len, self._steps.values()))

    @property
    def next_request(self) -> str:
        """Whose turn it is."""
        return next(iter(self._steps))

    def begin(self, request_id: str, step: Step) -> list[Fed]:
        """Do a step, or its first slice; behind others of its request it waits. Returns what came of it.

        Raises what the work raises.
        """
        if request_id in self._steps:
            self._steps[request_id].append(step)
            return []
        feds, is_done = _slice(step.work)
        if not is_done:
            self._steps[request_id] = deque([step])
        return feds

    def go_on(self, request_id: str) -> list[tuple[Step, Fed]]:
        """A request's turn, after which it is everyone else's. Returns what came of which step.

        Raises what the work raises; then the request waits no more.
        """
        steps = self._steps.pop(request_id)
        results: list[tuple[Step, Fed]] = []
        for _ in range(STEPS_AT_ONCE):
            feds, is_done = _slice(steps[0].work)
            results += [(steps[0], fed) for fed in feds]
            if is_done:
                steps.popleft()
            if not (is_done and steps):
                break
        if steps:
            self._steps[request_id] = steps
        return results

    def drop(self, request_id: str) -> None:
        """Nobody wants to know any more."""
        self._steps.pop(request_id, None)

    def clear(self) -> None:
        """Drop all."""
        self._steps.clear()


def _slice(work: Work) -> tuple[list[Fed], bool]:
    """What comes of a slice, and whether it was the last."""
    feds: list[Fed] = []
    for fed in work:
        if fed is None:
            return feds, False
        feds.append(fed)
    return feds, True
