"""Logging of every process: one line per event, the process's name in each.

A child's standard error is a pipe that the launcher drains. Should the launcher's own terminal block, the
pipe fills up; a child then drops lines rather than wait (``NonBlockingHandler``), so that no request ever
waits for a log line.
"""

from __future__ import annotations

import logging
import os
import select
import selectors
import stat
import threading
import traceback
from typing import IO

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s {name:<16} %(message)s"
_TIME = "%Y-%m-%d %H:%M:%S"


class NonBlockingHandler(logging.Handler):
    """Writes whole lines to standard error's descriptor; what cannot be written now is dropped and counted."""

    def __init__(self) -> None:
        super().__init__()
        self.num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            line = self.format(record)
        except Exception:
            line = f"unloggable record: {traceback.format_exc(limit=1)}"
        try:
            os.write(2, line.encode(errors="backslashreplace") + b"\n")
        except OSError:
            self.num_dropped += 1


def set_up_logging(process_name: str, level: str) -> None:
    """Send all loggers of this process to standard error. Call once."""
    if stat.S_ISFIFO(os.fstat(2).st_mode):
        os.set_blocking(2, False)
    handler = NonBlockingHandler()
    handler.setFormatter(logging.Formatter(_FORMAT.format(name=process_name), _TIME))
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(level.upper())
    logging.captureWarnings(True)


class LogRelay:
    """A thread of the launcher that copies the children's standard errors to its own (``descriptor``).

    It waits for a terminal that blocks, and outlives one that is gone: the children's pipes are always drained.
    """

    def __init__(self, descriptor: int = 2) -> None:
        self._descriptor = descriptor
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="log-relay", daemon=True)
        self._thread.start()

    def add(self, pipe: IO[bytes]) -> None:
        """Take over one child's pipe, until its end."""
        self._selector.register(pipe, selectors.EVENT_READ)
        os.write(self._wake_write, b"+")

    def close(self, timeout_s: float = 2.0) -> None:
        """Copy what is left, then end; waits no longer than ``timeout_s`` for a terminal that blocks."""
        self._stopping = True
        os.write(self._wake_write, b".")
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            for key in list(self._selector.get_map().values()):
                _close(key)
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _run(self) -> None:
        while not (self._stopping and len(self._selector.get_map()) == 1):
            events = self._selector.select(timeout=0 if self._stopping else None)
            if self._stopping and not events:
                break
            for key, _ in events:
                self._copy(key)

    def _copy(self, key: selectors.SelectorKey) -> None:
        lines = os.read(key.fd, 65536)
        if key.fd == self._wake_read:
            return
        if not lines:
            self._selector.unregister(key.fileobj)
            _close(key)
            return
        self._write(lines)

    def _write(self, lines: bytes) -> None:
        while lines:
            try:
                lines = lines[os.write(self._descriptor, lines) :]
            except BlockingIOError:
                select.select((), (self._descriptor,), ())
            except OSError:
                return  # nobody reads any more


def _close(key: selectors.SelectorKey) -> None:
    """A child's pipe; the relay's own is a number."""
    if not isinstance(key.fileobj, int):
        key.fileobj.close()  # type: ignore[attr-defined]
