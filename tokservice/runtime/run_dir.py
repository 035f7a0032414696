"""The private folder of one run: sockets and the resolved configuration. Launcher."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokservice.wire.channels import MAX_IPC_PATH_BYTES
from tokservice.wire.errors import ConfigError

PREFIX = "tokservice-"
_OWNER = "owner"
_LONGEST_SOCKET_NAME = len("/detokenizer.99.999999.ids")


@contextmanager
def run_directory(wanted: str) -> Iterator[Path]:
    """A folder that nobody else can enter, removed at the end; ``wanted`` '' makes a new one with a short path.

    Its owner holds a lock on a file in it, so that the folders of runs that were killed can be told from those
    that live; they are removed here. Raises ConfigError.
    """
    path = _given(Path(wanted)) if wanted else _new()
    lock = os.open(path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _try_lock(lock):
            raise ConfigError(f"runtime.run_dir: {path} is in use by another server")
        yield path
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def _given(path: Path) -> Path:
    path = path.absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        stat = path.stat()
    except OSError as error:
        raise ConfigError(f"runtime.run_dir: cannot use {path}: {error.strerror}") from error
    if stat.st_uid != os.getuid() or stat.st_mode & 0o077:
        raise ConfigError(f"runtime.run_dir: {path} must belong to you alone (mode 0700)")
    return path


def _new() -> Path:
    for base in (Path(tempfile.gettempdir()), Path("/tmp")):
        longest = len(os.fsencode(base)) + 1 + len(PREFIX) + 8 + _LONGEST_SOCKET_NAME
        if longest <= MAX_IPC_PATH_BYTES and base.is_dir():
            _remove_stale(base)
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    raise ConfigError("no folder for temporary files whose path is short enough for sockets: set runtime.run_dir")


def _remove_stale(base: Path) -> None:
    for path in base.glob(f"{PREFIX}*"):
        try:
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if _try_lock(lock):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
