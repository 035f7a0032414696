"""When a process that ended is started again. Pure."""

from __future__ import annotations

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 4.0
MAX_DOUBLINGS = 16  # of the pause: far beyond the longest, and no overflow after a thousand deaths
CRASH_LOOP_DEATHS = 5


class RestartPolicy:
    """Of one slot: at once after useful work; with growing pauses when it dies again and again without any."""

    def __init__(self) -> None:
        self._num_useless = 0

    def pause_after_death_s(self, *, did_work: bool) -> float:
        """Seconds until the next start. ``did_work``: it was ready and finished something."""
        self._num_useless = 0 if did_work else self._num_useless + 1
        if self._num_useless <= 1:
            return 0.0
        doublings = min(self._num_useless - 2, MAX_DOUBLINGS)
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**doublings)

    @property
    def is_crash_loop(self) -> bool:
        """It has died so often without any work that an operator should look."""
        return self._num_useless >= CRASH_LOOP_DEATHS
