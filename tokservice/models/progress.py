"""Progress of a long step, for people: a bar on a terminal, sparse log lines anywhere else.

Runs in the launcher. Imports tqdm only when a bar is drawn.
"""

from __future__ import annotations

import logging
import shutil
import sys
from types import TracebackType
from typing import Any, Self

logger = logging.getLogger(__name__)

_LOG_EVERY = 0.25  # of the whole


class Progress:
    """Counts up to ``total``; use it in a ``with``. Not thread-safe."""

    def __init__(self, title: str, total: int, unit: str, unit_scale: bool = False) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._unit_scale = unit_scale  # print 92.9M, not 92871040
        self._done = 0
        self._logged = 0.0
        self._bar: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from tqdm import tqdm

            columns, rows = shutil.get_terminal_size()  # 80x24 on a terminal that does not know its size
            self._bar = tqdm(
                desc=self._title,
                total=self._total,
                unit=self._unit,
                unit_scale=self._unit_scale,
                ncols=columns,
                nrows=rows,
            )
        else:
            logger.info("%s: started", self._title)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def move_to(self, done: int) -> None:
        """Set the count; it never falls and never passes the total."""
        done = max(self._done, min(done, self._total))
        moved, self._done = done - self._done, done
        if self._bar is not None:
            self._bar.update(moved)
            return
        share = done / self._total
        if share >= self._logged + _LOG_EVERY:
            self._logged = share - share % _LOG_EVERY
            logger.info("%s: %d %%", self._title, int(share * 100))
