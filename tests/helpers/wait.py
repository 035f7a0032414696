"""Waiting for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.02


def wait_for(condition: Callable[[], T | None], timeout_s: float = 60.0, what: str = "") -> T:
    """Poll until the condition is true; its value. Fails with the last value after the deadline.

    Only a fault waits for so long: a deadline is generous, or a busy machine fails the test.
    """
    deadline_s = time.monotonic() + timeout_s
    pause_s = SHORTEST_PAUSE_S
    while True:
        is_last = time.monotonic() > deadline_s
        if value := condition():
            return value
        assert not is_last, f"not within {timeout_s:g} s: {what or condition} (last: {value!r})"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
