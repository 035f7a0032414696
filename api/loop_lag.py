"""Heartbeat of an event loop: how late does a timer run? API process; stdlib alone.

The clock is ``time.monotonic``: the loop's own counts whole milliseconds. Its timers do too, so that a lag below
one millisecond says nothing.
"""

from __future__ import annotations

import asyncio
import time

from tokservice.runtime.metrics import Metrics


class LoopLag:
    """Measures the loop's lag for as long as it runs, into ``event_loop_lag_seconds``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, period_s: float, metrics: Metrics) -> None:
        self._loop = loop
        self._period_s = period_s
        self._metrics = metrics
        self._max_s = 0.0
        self._schedule()

    def _schedule(self) -> None:
        self._due_s = time.monotonic() + self._period_s
        self._loop.call_later(self._period_s, self._beat)

    def _beat(self) -> None:
        lag_s = max(0.0, time.monotonic() - self._due_s)
        self._metrics.observe("event_loop_lag_seconds", lag_s)
        if lag_s > self._max_s:
            self._max_s = lag_s
            self._metrics.set("event_loop_lag_max_seconds", lag_s)
        self._schedule()
