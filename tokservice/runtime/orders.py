"""What an operator has ordered by signals. Launcher; handlers only count, its loop acts.

SIGINT and SIGTERM stop the server, the second one at once; SIGHUP replaces its workers, or stops it too where its
terminal is lost.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tokservice.runtime.terminal import Terminal

SAME_ORDER_S = 0.2  # signals within so short a time are one: timeout(1) signals its child and then the child's group


class Orders:
    """So far; ``num_rolls`` is taken back by whoever obeys."""

    def __init__(self) -> None:
        self.num_stops = 0
        self.num_rolls = 0
        self.terminal = Terminal()
        self._stop_s = -SAME_ORDER_S

    @contextmanager
    def heard(self, wakeup: int) -> Iterator[None]:
        """Each signal writes to ``wakeup``, which wakes the loop, as a child's end does. The old handlers come back."""

        def stop(*_: object) -> None:
            if time.monotonic() - self._stop_s >= SAME_ORDER_S:
                self._stop_s = time.monotonic()
                self.num_stops += 1

        def hang_up(*_: object) -> None:
            if not self.terminal.is_being_lost(time.monotonic()):
                self.num_rolls += 1
            elif old_handlers[signal.SIGHUP] is not signal.SIG_IGN:  # as nohup(1) has it
                stop()

        os.set_blocking(wakeup, False)
        old_wakeup = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        old_handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        old_handlers[signal.SIGHUP] = signal.signal(signal.SIGHUP, hang_up)
        old_handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            yield
        finally:
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(old_wakeup)
