"""Steps of requests that take long take turns. Detokenizer worker; pure: no socket, no clock.

A step is the work on one message about a request. Most are done at once. One that is not waits, and with it all later
ones of its request, whose order counts. A turn is a slice of one request's work: whoever has something short to do
waits for one slice at most, however many have something long.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokservice.detokenizer.respond import Fed, Work
from tokservice.wire.messages import FinishReason

STEPS_AT_ONCE = 16  # short ones that waited behind a long one
EARLY_TURNS = 16  # of a request, after which it has written some 0.5 MB


class Step(NamedTuple):
    """Work of a ``Responder``, and what it is about."""

    work: Work
    token_ids: Sequence[int] = ()
    finish_reason: FinishReason = FinishReason.RUNNING


@dataclass(slots=True)
class _Waiting:
    """A request whose steps wait."""

    steps: deque[Step]
    num_turns: int = 0  # that it had


class Turns:
    """The requests whose steps wait.

    Early turns go round: what takes a few does not wait for what takes a thousand. Requests that need more are done
    one after the other, since each holds what it has written so far. Where there are both, they alternate.
    """

    def __init__(self) -> None:
        self._early: OrderedDict[str, _Waiting] = OrderedDict()
        self._late: OrderedDict[str, _Waiting] = OrderedDict()
        self._num_turns = 0

    def __len__(self) -> int:
        return len(self._early) + len(self._late)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._early or request_id in self._late

    @property
    def num_steps(self) -> int:
        """That wait."""
        return sum(len(waiting.steps) for queue in (self._early, self._late) for waiting in queue.values())

    @property
    def next_request(self) -> str:
        """Whose turn it is."""
        queues = [queue for queue in (self._early, self._late) if queue]
        return next(iter(queues[self._num_turns % len(queues)]))

    def begin(self, request_id: str, step: Step) -> list[Fed]:
        """Do a step, or its first slice; behind others of its request it waits. Returns what came of it.

        Raises what the work raises.
        """
        if request_id in self:
            self._queue_of(request_id)[request_id].steps.append(step)
            return []
        feds, is_done = _slice(step.work)
        if not is_done:
            self._early[request_id] = _Waiting(deque([step]))
        return feds

    def go_on(self, request_id: str) -> list[tuple[Step, Fed]]:
        """A request's turn. Returns what came of which step.

        Raises what the work raises; then the request waits no more.
        """
        self._num_turns += 1
        waiting = self._queue_of(request_id).pop(request_id)
        steps = waiting.steps
        results: list[tuple[Step, Fed]] = []
        for _ in range(STEPS_AT_ONCE):
            feds, is_done = _slice(steps[0].work)
            results += [(steps[0], fed) for fed in feds]
            if is_done:
                steps.popleft()
            if not (is_done and steps):
                break
        if steps:
            self._put_back(request_id, waiting)
        return results

    def drop(self, request_id: str) -> None:
        """Nobody wants to know any more."""
        self._queue_of(request_id).pop(request_id, None)

    def clear(self) -> None:
        """Drop all."""
        self._early.clear()
        self._late.clear()

    def _queue_of(self, request_id: str) -> OrderedDict[str, _Waiting]:
        return self._late if request_id in self._late else self._early

    def _put_back(self, request_id: str, waiting: _Waiting) -> None:
        waiting.num_turns += 1
        if waiting.num_turns < EARLY_TURNS:
            self._early[request_id] = waiting
        else:
            self._late[request_id] = waiting
            self._late.move_to_end(request_id, last=waiting.num_turns == EARLY_TURNS)


def _slice(work: Work) -> tuple[list[Fed], bool]:
    """What comes of a slice, and whether it was the last."""
    feds: list[Fed] = []
    for fed in work:
        if fed is None:
            return feds, False
        feds.append(fed)
    return feds, True
