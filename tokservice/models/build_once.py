"""A folder that is built once, whole or not at all, and reused afterwards.

Runs in the launcher. The folder is made in a temporary sibling, synced to the disk and renamed. Builders of the
same folder, in any number of processes, wait for one another on a lock file; the kernel frees the lock of one
that dies, and the next builder removes what it left behind. A seal inside the folder says what it was built from
and how large its files are, so that a reader knows in a millisecond whether it is whole.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

SEAL = ".tokservice.json"


def build_once(folder: Path, fingerprint: str, build: Callable[[Path, Path], None]) -> None:
    """Return when ``folder`` is whole and sealed with ``fingerprint``, after building it where it is not.

    ``build(new, scratch)`` fills the empty folder ``new`` and may leave anything in ``scratch``. Another
    fingerprint in the seal, or a file that is missing or of another size, is a reason to build again. Raises
    OSError, and whatever ``build`` raises; then nothing is left behind.
    """
    if is_sealed(folder, fingerprint):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f".{folder.name}.lock")):
        if is_sealed(folder, fingerprint):  # by the one we waited for
            return
        staging_prefix = f".{folder.name}.tmp-"
        for leftover in folder.parent.glob(f"{staging_prefix}*"):
            logger.info("removing the remains of an interrupted build: %s", leftover)
            shutil.rmtree(leftover, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=staging_prefix, dir=folder.parent))
        try:
            new, scratch = staging / "new", staging / "scratch"
            new.mkdir()
            scratch.mkdir()
            build(new, scratch)
            shutil.rmtree(scratch)
            _seal(new, fingerprint)
            if folder.exists():
                shutil.rmtree(folder)
            new.rename(folder)
            _sync(folder.parent)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def is_sealed(folder: Path, fingerprint: str) -> bool:
    """Whether the folder was built from just this and its files still have their sizes."""
    try:
        seal = json.loads((folder / SEAL).read_bytes())
        sizes = {name: (folder / name).stat().st_size for name in seal["sizes"]}
        return bool(seal == {"fingerprint": fingerprint, "sizes": sizes})
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _seal(folder: Path, fingerprint: str) -> None:
    """Sync every file, then write the seal, then sync that: a sealed folder is whole even after a power cut."""
    files = sorted(folder.iterdir())
    for file in files:
        file.chmod(0o644)
        _sync(file)
    sizes = {file.name: file.stat().st_size for file in files}
    seal = folder / SEAL
    seal.write_text(json.dumps({"fingerprint": fingerprint, "sizes": sizes}, indent=1))
    _sync(seal)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(lock_file: Path) -> Iterator[None]:
    """Hold the lock. The file stays: removing it would let two processes lock two different files."""
    with lock_file.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that builds the same folder (lock: %s)", lock_file)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
