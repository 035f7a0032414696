"""What a worker is working on, written where it outlives the worker: a mapped file in the run directory.

A message could not say it: it may still be in the process when the work kills it.
"""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

log = logging.getLogger(__name__)

MARK_BYTES = 512


class WorkMark:
    """The worker's side. Setting and clearing cost a copy in memory."""

    def __init__(self, run_dir: Path, identity: str) -> None:
        descriptor = os.open(_path(run_dir, identity), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # Its place on the disk is taken now: where there was none later, writing to it would end the process.
            os.posix_fallocate(descriptor, 0, MARK_BYTES)
            self._memory = mmap.mmap(descriptor, MARK_BYTES)
        except OSError as error:  # the disk is full
            log.warning("no mark will tell what this worker died over: %s", error)
            self._memory = mmap.mmap(-1, MARK_BYTES)
        finally:
            os.close(descriptor)

    def set(self, mark: bytes) -> None:
        """The work begins; ``mark`` is its ``encode_mark``."""
        self._memory[:] = mark

    def clear(self) -> None:
        """It is done."""
        self._memory[0] = 0


def encode_mark(request_id: str, attempt: int) -> bytes:
    """A mark as it is written; for work that comes in many small pieces it is made once."""
    return f"{attempt} {request_id}".encode().ljust(MARK_BYTES, b"\0")


def take_mark(run_dir: Path, identity: str) -> tuple[str, int] | None:
    """The (request_id, attempt) that a dead worker was working on; None if nothing, or if it left no mark.

    The file is removed.
    """
    path = _path(run_dir, identity)
    try:
        content = path.read_bytes().rstrip(b"\0").decode()
        path.unlink()
        attempt, request_id = content.split(" ", 1)
        return request_id, int(attempt)
    except (OSError, ValueError):
        return None


def _path(run_dir: Path, identity: str) -> Path:
    return run_dir / f"{identity}.working"
