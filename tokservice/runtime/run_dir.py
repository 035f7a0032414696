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
    that live; they are removed here. A given folder must be new, empty, or left by an earlier run. Raises
    ConfigError.
    """
    path, lock = _given(Path(wanted)) if wanted else _new()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _given(path: Path) -> tuple[Path, int]:
    path = path.absolute()
    room = MAX_IPC_PATH_BYTES - _LONGEST_SOCKET_NAME
    if len(os.fsencode(path)) > room:
        raise ConfigError(f"runtime.run_dir: {path} is longer than {room} bytes, too long for the sockets in it")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        stat = path.stat()
        names = set(os.listdir(path))
    except OSError as error:
        raise ConfigError(f"runtime.run_dir: cannot use {path}: {error.strerror}") from error
    if stat.st_uid != os.getuid() or stat.st_mode & 0o077:
        raise ConfigError(f"runtime.run_dir: {path} must belong to you alone (mode 0700)")
    if names and _OWNER not in names:
        raise ConfigError(f"runtime.run_dir: {path} holds other files; it is removed at the end, so name a new folder")
    try:
        lock = os.open(path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"runtime.run_dir: cannot write into {path}: {error.strerror}") from error
    if not _try_lock(lock):
        os.close(lock)
        raise ConfigError(f"runtime.run_dir: {path} is in use by another server")
    return path, lock


def _new() -> tuple[Path, int]:
    try:
        for base in (Path(tempfile.gettempdir()), Path("/tmp")):
            longest = len(os.fsencode(base)) + 1 + len(PREFIX) + 8 + _LONGEST_SOCKET_NAME
            if longest <= MAX_IPC_PATH_BYTES and base.is_dir():
                return _new_in(base)
    except OSError as error:  # all of them are full or read-only
        raise ConfigError(f"no folder for this run: {error.strerror}: set TMPDIR or runtime.run_dir") from error
    raise ConfigError("no folder for temporary files whose path is short enough for sockets: set runtime.run_dir")


def _new_in(base: Path) -> tuple[Path, int]:
    _remove_stale(base)
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    # Locked before it has its name: nobody can take the folder for a stale one in between.
    lock = os.open(path / f"{_OWNER}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _try_lock(lock)
    os.rename(path / f"{_OWNER}.new", path / _OWNER)
    return path, lock


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
