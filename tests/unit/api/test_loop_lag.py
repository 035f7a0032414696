"""The heartbeat's arithmetic, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from api.loop_lag import LoopLag
from tokservice.runtime.metrics import Metrics


class FakeLoop:
    """Keeps the one timer."""

    def __init__(self) -> None:
        self.callback: Callable[[], None] = lambda: None
        self.delay_s = 0.0

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.delay_s, self.callback = delay_s, callback


def test_lag_is_what_a_tick_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Early ticks count as none; the next tick is due a period after this one ran."""
    clock = [100.0]
    monkeypatch.setattr("api.loop_lag.time.monotonic", lambda: clock[0])
    metrics, loop = Metrics(), FakeLoop()
    LoopLag(loop, 0.010, metrics)  # type: ignore[arg-type]
    for now_s in (100.010, 100.0199, 100.0799, 100.0909):  # late by 0, -0.1, 50 and 1 ms
        clock[0] = now_s
        assert loop.delay_s == 0.010
        loop.callback()
    values = {metric.name: metric.values for metric in metrics.snapshot()}
    counts, total_s = values["event_loop_lag_seconds"][:-1], values["event_loop_lag_seconds"][-1]
    assert sum(counts) == 4
    assert total_s == pytest.approx(0.051)
    assert values["event_loop_lag_max_seconds"][0] == pytest.approx(0.050)
