"""A server's /metrics page, read from outside: counters by process, and histograms that can be subtracted."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from _client import Target

from tokservice.runtime.metrics import LOOP_LAG, PREFIX, Metrics

LAG = "event_loop_lag_seconds"
_POLL_S = 0.05
_FRESH_TIMEOUT_S = 5.0
_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts between upper bounds; the last bound is infinite."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    @classmethod
    def of_lag(cls, metrics: Metrics) -> Self:
        """The loop's lag as a process has counted it itself."""
        values = next(metric.values for metric in metrics.snapshot() if metric.name == LAG)
        return cls((*LOOP_LAG, math.inf), values[:-1])

    @property
    def total(self) -> int:
        """Number of values."""
        return int(sum(self.counts))

    def quantile(self, share: float) -> float:
        """By linear interpolation inside the bucket; nan where there are no values."""
        wanted = share * sum(self.counts)
        below = 0.0
        for low, high, count in zip((0.0, *self.bounds), self.bounds, self.counts, strict=False):
            if count and below + count >= wanted:
                return low if math.isinf(high) else low + (high - low) * (wanted - below) / count
            below += count
        return math.nan

    @property
    def highest(self) -> float:
        """Upper bound of the highest bucket that holds a value: no value is above it; nan where there are none."""
        return max((bound for bound, count in zip(self.bounds, self.counts, strict=True) if count), default=math.nan)

    def __add__(self, other: Self) -> Self:
        return type(self)(self.bounds, tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    def __sub__(self, other: Self) -> Self:
        return type(self)(self.bounds, tuple(a - b for a, b in zip(self.counts, other.counts, strict=True)))


class Page:
    """One page, parsed. A metric that the server does not have is empty."""

    def __init__(self, text: str) -> None:
        self._series: dict[str, list[tuple[dict[str, str], float]]] = {}
        for line in text.splitlines():
            match = _LINE.fullmatch(line)
            if match and match[1].startswith(PREFIX):
                labels = dict(_LABEL.findall(match[2] or ""))
                self._series.setdefault(match[1].removeprefix(PREFIX), []).append((labels, float(match[3])))

    def by_process(self, name: str) -> dict[str, float]:
        """The values of a per-process metric."""
        return {labels["process"]: value for labels, value in self._series.get(name, ())}

    def total(self, name: str) -> float:
        """The sum of a metric over all processes and labels."""
        return sum(value for _, value in self._series.get(name, ()))

    def lag(self) -> Histogram | None:
        """The lag of the API processes' loops, all together."""
        rows: dict[str, list[tuple[float, float]]] = {}
        for labels, value in self._series.get(f"{LAG}_bucket", ()):
            rows.setdefault(labels["process"], []).append((float(labels["le"]), value))
        histograms = [_from_cumulative(row) for row in rows.values()]
        return sum(histograms[1:], histograms[0]) if histograms else None


async def fresh_page(target: Target) -> Page | None:
    """A page that knows all that happened before the call; None where the server has no such metrics.

    Processes report from time to time, and the page is rendered from what they reported last. So wait for the
    second change of each process's CPU time: the first may come of a report that was already under way.
    """
    num_changes: dict[str, int] = {}
    seen: dict[str, float] = {}
    deadline_s = time.monotonic() + _FRESH_TIMEOUT_S
    while True:
        text = await target.fetch("/metrics")
        page = Page((text or b"").decode(errors="replace"))
        if page.lag() is None:
            return None
        for process, value in page.by_process("process_cpu_seconds_total").items():
            num_changes[process] = num_changes.get(process, -1) + (seen.get(process) != value)
            seen[process] = value
        if min(num_changes.values()) >= 2 or time.monotonic() >= deadline_s:
            return page
        await asyncio.sleep(_POLL_S)


def _from_cumulative(row: Sequence[tuple[float, float]]) -> Histogram:
    bounds, totals = zip(*sorted(row), strict=True)
    return Histogram(bounds, tuple(total - before for total, before in zip(totals, (0.0, *totals), strict=False)))
