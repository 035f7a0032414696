"""Requests that wait for their guides, which one thread compiles while the others' steps go on.

Engine process. A grammar takes up to some 0.1 s, in which the step loop must not stand still. Everything here but
the compiling itself is called from the thread of the step loop.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from engine.core import RequestRefused
from engine.torch_core.guide import Guide, GuideMaker
from engine.torch_core.request import Sequence

THREAD_NICE = 5  # on Linux a thread has a priority of its own: steps come first


@dataclass(frozen=True, slots=True)
class _Waiting:
    sequences: list[Sequence]
    guides: Future[list[Guide]]  # in the order of the sequences


class GuideQueue:
    """First come, first compiled."""

    def __init__(self, maker: GuideMaker) -> None:
        self._maker = maker
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guides", initializer=os.nice, initargs=(THREAD_NICE,))
        self._waiting: dict[str, _Waiting] = {}  # by request id

    @property
    def num_waiting(self) -> int:
        """Choices whose guide is not ready; ended ones may be among them for a while."""
        return sum(len(waiting.sequences) for waiting in self._waiting.values())

    def add(self, request_id: str, sequences: list[Sequence]) -> None:
        """Begin to compile the guide that these choices of one request have in common."""
        sampling = sequences[0].sampling
        outputs = [sequence.output_ids.copy() for sequence in sequences]
        guides = self._thread.submit(self._maker.make, sampling.guide_kind, sampling.guide, outputs)
        self._waiting[request_id] = _Waiting(sequences, guides)

    def drop(self, request_id: str) -> None:
        """Nobody wants a request's guides any more, if there are any."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting.guides.cancel()

    def ready(self) -> Iterator[tuple[list[Sequence], list[Guide] | RequestRefused]]:
        """Hand out the requests whose guides are compiled, or cannot be."""
        done = [request_id for request_id, waiting in self._waiting.items() if waiting.guides.done()]
        for request_id in done:
            waiting = self._waiting.pop(request_id)
            error = waiting.guides.exception()
            if error is None:
                yield waiting.sequences, waiting.guides.result()
            else:  # whatever the library raised is this request's fault alone
                yield waiting.sequences, RequestRefused(str(error))

    def wait(self, timeout_s: float) -> None:
        """Sleep until the next guide is ready, but no longer than ``timeout_s``."""
        wait([next(iter(self._waiting.values())).guides], timeout_s)
