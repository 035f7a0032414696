"""What ``chaos.py`` does to a running system, by seeded schedules: SIGKILL, SIGSTOP, floods of requests."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from typing import Any

from _chaos_load import Question, Tally, flood
from _client import Answer, Target
from _extras import psutil

WORKERS = ("tokenizer", "detokenizer", "engine")
HANG_SHARE = 0.2  # of the workers that are stopped: for good, until the supervisor gives them up
LONGEST_STOP_S = 2.0
TITLE = re.compile(r"tokservice: (\w+) (\d+)")


def system() -> Iterator[tuple[str, int, psutil.Process]]:
    """All living processes of ours, by role and slot."""
    for process in psutil.Process().children(recursive=True):
        try:
            match = TITLE.search(" ".join(process.cmdline()))
        except psutil.Error:
            continue
        if match:
            yield match[1], int(match[2]), process


async def why_not_ready(target: Target) -> str:
    """What the server says; '' if all processes are ready."""
    answer = Answer(keep=True)
    connection = await target.connect()
    await connection.send(target.get("/ready"), answer)
    connection.close()
    return "" if answer.status == 200 else bytes(answer.body).decode() or answer.error


async def killer(target: Target, rng: random.Random, mean_pause_s: float, until_s: float, tally: Tally) -> None:
    """SIGKILL any worker at any moment, before it is ready too."""
    del target  # nobody is asked
    async for _ in _moments(rng, mean_pause_s, until_s):
        role = rng.choice(WORKERS)
        if _signal(rng, role, signal.SIGKILL):
            tally.kills[role] += 1


async def careful_killer(target: Target, rng: random.Random, mean_pause_s: float, until_s: float, tally: Tally) -> None:
    """SIGKILL where starting takes long: ready processes alone, an engine at most once in three start-up times."""
    engine_rests_until_s = 0.0
    async for _ in _moments(rng, mean_pause_s, until_s):
        role = rng.choice([role for role in WORKERS if role != "engine" or time.monotonic() >= engine_rests_until_s])
        if await why_not_ready(target) or not _signal(rng, role, signal.SIGKILL):
            continue
        tally.kills[role] += 1
        if role == "engine":
            start_s = time.monotonic()
            for not_ready in (False, True):  # first the page has to say that it is gone
                while bool(await why_not_ready(target)) is not_ready and time.monotonic() < until_s:
                    await asyncio.sleep(0.1)
            engine_rests_until_s = time.monotonic() + 2 * (time.monotonic() - start_s)


async def stopper(target: Target, rng: random.Random, mean_pause_s: float, until_s: float, tally: Tally) -> None:
    """SIGSTOP a ready process for a while; some workers for good."""
    async for _ in _moments(rng, mean_pause_s, until_s):
        role = rng.choice((*WORKERS, "router", "api"))
        if await why_not_ready(target):
            continue
        hangs = role in WORKERS and rng.random() < HANG_SHARE
        process = _signal(rng, role, signal.SIGSTOP)
        if process is None:
            continue
        (tally.hangs if hangs else tally.stops)[role] += 1
        if not hangs:
            await asyncio.sleep(rng.uniform(0.05, LONGEST_STOP_S))
            with suppress(psutil.NoSuchProcess):  # killed meanwhile
                process.send_signal(signal.SIGCONT)


async def flooder(
    target: Target,
    rng: random.Random,
    mean_pause_s: float,
    until_s: float,
    tally: Tally,
    asked: Sequence[Question],
    right: Sequence[Any],
    count: int,
) -> None:
    """More requests at once than are admitted."""
    async for _ in _moments(rng, mean_pause_s, until_s):
        await flood(target, asked, right, count, tally)


async def _moments(rng: random.Random, mean_pause_s: float, until_s: float) -> AsyncIterator[None]:
    """At random; none if the mean pause is 0."""
    while mean_pause_s and (pause_s := rng.expovariate(1 / mean_pause_s)) + time.monotonic() < until_s:
        await asyncio.sleep(pause_s)
        yield


def _signal(rng: random.Random, role: str, number: signal.Signals) -> psutil.Process | None:
    """Send a signal to any process of a role; None if there is none."""
    victims = [process for name, _, process in system() if name == role]
    if not victims:
        return None
    victim = rng.choice(victims)
    os.kill(victim.pid, number)
    return victim
