"""Waiting for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T], timeout_s: float = 10.0, what: str = "") -> T:
    """Poll until the condition is true; its value. Fails with the last value after the deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what or condition} (last: {value!r})")
        time.sleep(0.01)
    return value
