"""What ``chaos.py`` looks for when the load is over: memory, open files, sockets in the run directory, processes."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from _chaos_damage import system, why_not_ready
from _client import Target
from _extras import psutil

SETTLE_TIMEOUT_S = 60.0
LONG_LIVED = ("launcher", "router", "api")
MAX_GROWTH = 1.25  # of resident memory, from the middle of a run to its end,
MAX_GROWTH_MB = 16.0  # or so much
FEW = 4  # open files: connections that are just closing, and those of whoever looks
IDLE = ("num_requests_unfinished", "num_requests_running", "num_requests_waiting", "unfinished_bytes")


@dataclass(frozen=True, slots=True)
class Held:
    """What the system holds at one moment."""

    memory_mb: dict[str, float]  # resident, of the processes that live through it all
    files: dict[str, int]  # open, of the same
    processes: Counter[str]
    socket_files: int  # in the run directory


def held(run_dir: Path) -> Held:
    """Of now."""
    processes = [(f"{role} {slot}", process) for role, slot, process in system()]
    launcher = next(process for name, process in processes if name.startswith("router")).parent()
    long_lived = {name: process for name, process in processes if name.split()[0] in LONG_LIVED}
    if launcher is not None:
        long_lived["launcher"] = launcher
    return Held(
        {name: process.memory_info().rss / 1e6 for name, process in long_lived.items()},
        {name: process.num_fds() for name, process in long_lived.items()},
        Counter(name for name, _ in processes),
        sum(path.is_socket() for path in run_dir.iterdir()),
    )


async def leaks(target: Target, run_dir: Path, before: Held) -> list[str]:
    """What has not come to rest when all clients have ended."""
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    while (left := await _unsettled(target, run_dir, before)) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.5)
    return left


def growth(middle: Held, after: Held) -> list[str]:
    """Memory that did not stay where it was."""
    return [
        f"{name} grew from {middle.memory_mb[name]:.0f} to {megabytes:.0f} MB"
        for name, megabytes in after.memory_mb.items()
        if megabytes > max(middle.memory_mb[name] * MAX_GROWTH, middle.memory_mb[name] + MAX_GROWTH_MB)
    ]


async def _unsettled(target: Target, run_dir: Path, before: Held) -> list[str]:
    if reason := await why_not_ready(target):
        return [reason]
    page = (await target.fetch("/metrics") or b"").decode()
    left = [
        f"{name} is {value}"
        for name in IDLE
        for value in re.findall(rf"^tokservice_{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
        if float(value)
    ]
    now = held(run_dir)
    left += [f"{name} has {count} open files" for name, count in now.files.items() if count > before.files[name] + FEW]
    if now.processes != before.processes:
        left.append(f"processes are {sorted(now.processes.elements())}")
    if now.socket_files > before.socket_files:
        left.append(f"{now.socket_files} socket files, {before.socket_files} at the start")
    return left


def survivors(processes: list[psutil.Process], run_dir: Path) -> list[str]:
    """What is there though the system has stopped."""
    left = [f"process {process.pid} is still there" for process in psutil.wait_procs(processes, timeout=5)[1]]
    return left + ([f"{run_dir} is still there"] if run_dir.exists() else [])
