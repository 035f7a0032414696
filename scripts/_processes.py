"""What the processes of a server use: CPU time, time spent waiting for a CPU, memory. Read from /proc (Linux).

CPU times are those behind ``process_cpu_seconds_total`` of /metrics, but of this very moment and exact to the
microsecond, so that short windows can be measured.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_PROC = Path("/proc")
_TITLE = re.compile(rb"tokservice: (\w+) \d+")
_STATUS = re.compile(r"^(VmRSS|VmHWM):\s+(\d+) kB$", re.MULTILINE)
_RESET_PEAK = "5"  # proc(5), clear_refs


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process, or of several together."""

    cpu_s: float = 0.0  # of all threads
    delay_s: float = 0.0  # the main thread could have run, but got no CPU
    resident_bytes: int = 0
    peak_bytes: int = 0  # of resident memory, since the last ``reset_peaks``

    def __add__(self, other: Self) -> Self:
        return type(self)(
            self.cpu_s + other.cpu_s,
            self.delay_s + other.delay_s,
            self.resident_bytes + other.resident_bytes,
            self.peak_bytes + other.peak_bytes,
        )


class Processes:
    """The processes of the one server that this process has started and that runs now."""

    def __init__(self) -> None:
        self._pids = [(role, pid) for pid in _descendants(os.getpid()) if (role := _role(pid))]

    def usage(self) -> dict[str, Usage]:
        """By role. Raises RuntimeError where a process is gone."""
        found: dict[str, Usage] = {}
        for role, pid in self._pids:
            try:
                found[role] = found.get(role, Usage()) + _usage(pid)
            except OSError as error:
                raise RuntimeError(f"a {role} process of the server is gone") from error
        return found

    def reset_peaks(self) -> None:
        """Peaks begin at what is resident now."""
        for _, pid in self._pids:
            (_PROC / str(pid) / "clear_refs").write_text(_RESET_PEAK)


@dataclass(frozen=True, slots=True)
class Spent:
    """Of some stretch of time, by role."""

    wall_s: float
    cpu_s: dict[str, float]
    delay_s: dict[str, float]  # see Usage

    @property
    def cpu_share(self) -> dict[str, float]:
        """Of one core."""
        return {role: value / self.wall_s for role, value in self.cpu_s.items()}

    @property
    def delay_share(self) -> dict[str, float]:
        """Of the time."""
        return {role: value / self.wall_s for role, value in self.delay_s.items()}


class StopWatch:
    """Runs from when it is made."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._before = processes.usage()
        self._start_s = time.perf_counter()

    def read(self) -> Spent:
        """What was spent until now."""
        wall_s = time.perf_counter() - self._start_s
        after = self._processes.usage()
        return Spent(
            wall_s,
            {role: usage.cpu_s - self._before[role].cpu_s for role, usage in after.items()},
            {role: usage.delay_s - self._before[role].delay_s for role, usage in after.items()},
        )


def _usage(pid: int) -> Usage:
    folder = _PROC / str(pid)
    threads = {thread.name: _schedstat(thread) for thread in (folder / "task").iterdir()}
    memory = {name: int(kib) * 1024 for name, kib in _STATUS.findall((folder / "status").read_text())}
    return Usage(
        cpu_s=sum(cpu_s for cpu_s, _ in threads.values()),
        delay_s=threads[str(pid)][1],
        resident_bytes=memory["VmRSS"],
        peak_bytes=memory["VmHWM"],
    )


def _schedstat(folder: Path) -> tuple[float, float]:
    """Seconds on a CPU, and seconds of waiting for one."""
    cpu_ns, delay_ns, _ = (folder / "schedstat").read_text().split()
    return int(cpu_ns) / 1e9, int(delay_ns) / 1e9


def _role(pid: int) -> str:
    try:
        title = _TITLE.search((_PROC / str(pid) / "cmdline").read_bytes())
    except OSError:
        return ""
    return title[1].decode() if title else ""


def _descendants(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in _PROC.glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
        children.setdefault(parent, []).append(int(folder.name))
    found = [ancestor]
    for pid in found:  # which grows meanwhile
        found += children.get(pid, [])
    return found
