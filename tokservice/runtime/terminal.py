"""Whether the terminal that a process was started from is still there. Launcher.

SIGHUP means two things: an order from an operator, and that the terminal's window or connection was closed.
"""

from __future__ import annotations

import errno
import os

HANG_UP_S = 2.0  # signals of a lost terminal come with its loss, from the kernel and from shells
GONE = (errno.ENXIO, errno.EIO)


class Terminal:
    """The controlling terminal, if there is one. ``now_s`` is monotonic."""

    def __init__(self) -> None:
        self._is_there = _can_be_opened()
        self._lost_s = -HANG_UP_S

    def is_being_lost(self, now_s: float) -> bool:
        """Whether it was lost just now. To be asked every second or so, since a loss is dated by the first answer."""
        if self._is_there and not _can_be_opened():
            self._is_there = False
            self._lost_s = now_s
        return now_s - self._lost_s < HANG_UP_S


def _can_be_opened() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno not in GONE
    return True
