"""How late this machine itself is at times: a test that measures how late something else is has to know."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ROUNDS = 3  # to measure in: a fault shows in each, a hiccup of the machine hardly in three of them
TICKER = """
import select, sys, time
worst_s, is_over = 0.0, []
while not is_over:
    start_s = time.monotonic()
    is_over, _, _ = select.select([sys.stdin], [], [], 0.001)
    worst_s = max(worst_s, time.monotonic() - start_s - 0.001)
print(worst_s)
"""


@contextmanager
def hiccups() -> Iterator[Callable[[], float]]:
    """Within, a process does nothing but sleep for milliseconds. The function ends it: by how much it overslept, s."""
    with subprocess.Popen([sys.executable, "-c", TICKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as ticker:
        yield lambda: float(ticker.communicate(timeout=60)[0])
