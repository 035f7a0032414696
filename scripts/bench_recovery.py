"""How long clients wait when a process of the system is killed.

    python scripts/bench_recovery.py [--repeats 5] [--torch]

Starts the whole system in its default size. Then, for each kind of process, again and again: SIGKILL, and short
completions one after the other, on new connections, until one is answered. The launcher comes last: all its processes
are to end, and the next start is timed until it has answered. A table (medians and longest of so many), then one JSON
line.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

from _chaos_damage import system, why_not_ready
from _client import Answer, Connection, Target, kind_of
from _extras import psutil
from _report import json_line, table
from _server import ROOT, running_server
from tqdm import tqdm

ROLES = ("tokenizer", "detokenizer", "engine", "router", "api")
TIMEOUT_S = 120.0
PAUSE_S = 0.01
REQUEST = {"prompt": "Hello", "max_tokens": 1, "temperature": 0}


async def is_served(target: Target) -> bool:
    """Whether a new client gets an answer."""
    answer = Answer(keep=True)
    connection: Connection | None = None
    try:
        connection = await target.connect()
        await connection.send(target.post("/v1/completions", REQUEST), answer)
    except OSError as error:
        answer.error = kind_of(error)
    if connection is not None:
        connection.close()
    return answer.whole and answer.status == 200


async def until(condition: Callable[[], Awaitable[bool]], start_s: float) -> float:
    """Seconds until a condition holds. Raises TimeoutError."""
    async with asyncio.timeout(TIMEOUT_S):
        while not await condition():
            await asyncio.sleep(PAUSE_S)
    return time.monotonic() - start_s


async def recovery(target: Target, role: str) -> tuple[float, float]:
    """Kill all processes of a role: seconds until a client is served, and until all processes are ready."""

    async def is_ready() -> bool:
        try:
            return not await why_not_ready(target)
        except OSError:
            return False

    victims = [process.pid for name, _, process in system() if name == role]
    start_s = time.monotonic()
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    served_s = await until(lambda: is_served(target), start_s)
    gone = [pid for pid in victims if pid in {process.pid for _, _, process in system()}]
    if gone:
        raise RuntimeError(f"{role} was not killed: {gone}")
    return served_s, await until(is_ready, start_s)


async def measure(url: str, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Of each role."""
    target = Target(url)
    await until(lambda: is_served(target), time.monotonic())
    found: dict[str, list[tuple[float, float]]] = {role: [] for role in ROLES}
    for role in tqdm([role for role in ROLES for _ in range(repeats)], leave=False, file=sys.stderr):
        found[role].append(await recovery(target, role))
    return found


def kill_launcher() -> float:
    """Seconds until no process of the system is left."""
    processes = [process for _, _, process in system()]
    launcher = processes[0].parent()
    if launcher is None:
        raise RuntimeError("the system has no launcher")
    start_s = time.monotonic()
    launcher.kill()
    if alive := psutil.wait_procs(processes, timeout=TIMEOUT_S)[1]:
        raise RuntimeError(f"still there: {alive}")
    return time.monotonic() - start_s


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--torch", action="store_true", help="the default model instead of the simulated engine")
    arguments = parser.parse_args(argv)
    config = ROOT / "configs" / ("default.toml" if arguments.torch else "simulated.toml")
    with running_server("--config", str(config)) as url:
        found = asyncio.run(measure(url, arguments.repeats))
        gone_s = kill_launcher()
    start_s = time.monotonic()
    with running_server("--config", str(config)) as url:
        target = Target(url)
        asyncio.run(until(lambda: is_served(target), start_s))
        start_up_s = time.monotonic() - start_s
    rows = [
        (
            role,
            *(f"{statistics.median(times):.2f} ({max(times):.2f})" for times in zip(*pairs, strict=True)),
        )
        for role, pairs in found.items()
    ]
    rows.append(("launcher", f"{gone_s:.2f} until all have ended", f"{start_up_s:.2f} for the next start"))
    print(table(("killed", "served again after (s)", "all ready after (s)"), rows))
    record = {"benchmark": "recovery", "engine": "torch" if arguments.torch else "simulated", "seconds": found}
    print(json_line({**record, "all_ended_s": gone_s, "start_up_s": start_up_s}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
