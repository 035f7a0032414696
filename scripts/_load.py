"""Load for a server: requests that are kept in flight while something is measured."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from _client import Answer, Target, closed_loop

_POLL_S = 0.01
_START_TIMEOUT_S = 120.0

Group = tuple[int, Sequence[bytes]]  # number of clients, and the requests that they send in turn


@asynccontextmanager
async def in_flight(target: Target, *groups: Group) -> AsyncIterator[list[Answer]]:
    """Keep the requests of all groups in flight; yields the answers so far, unfinished ones too.

    At the end the clients hang up.
    """
    answers: list[Answer] = []
    tasks = [
        asyncio.create_task(closed_loop(target, source, answers))
        for number, requests in groups
        for source in (itertools.cycle(requests),)
        for _ in range(number)
    ]
    try:
        yield answers
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Exception):  # a fault of ours
            raise outcome


async def all_of(target: Target, requests: Iterable[bytes], num_clients: int) -> list[Answer]:
    """Have so many clients send the requests, each once; returns when all have ended."""
    answers: list[Answer] = []
    source = iter(requests)
    await asyncio.gather(*(closed_loop(target, source, answers) for _ in range(num_clients)))
    return answers


async def started(answers: list[Answer], number: int) -> None:
    """Until so many streams have sent something. Raises RuntimeError where they do not."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while sum(answer.first_s > 0 for answer in answers) < number:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"not all of {number} streams have started: {dict(errors(answers))}")
        await asyncio.sleep(_POLL_S)


def errors(answers: Iterable[Answer]) -> Counter[str]:
    """What went wrong, by kind."""
    return Counter(answer.error for answer in answers if answer.error)
