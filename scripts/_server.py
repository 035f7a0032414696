"""A server of our own for a benchmark: started on a free port, stopped at the end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIMULATED = ROOT / "configs" / "simulated.toml"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
_POLL_S = 0.05
_BANNER = re.compile(rb"is ready at (\S+)")


@contextmanager
def running_server(*arguments: str) -> Iterator[str]:
    """The URL of a server started with the simulated engine and these arguments. Raises RuntimeError."""
    command = [sys.executable, str(ROOT / "scripts" / "launch.py"), "--config", str(SIMULATED), "--port", "0"]
    with tempfile.TemporaryFile() as log:
        # In our session: priorities count only between processes of one session.
        launcher = subprocess.Popen(
            [*command, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, process_group=0
        )
        with _sigterm_unwinds():
            try:
                yield _wait_until_ready(launcher, log.fileno())
            except Exception:
                print(_read(log.fileno())[-5000:].decode(errors="replace"), file=sys.stderr)
                raise
            finally:
                launcher.terminate()
                try:
                    launcher.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    launcher.kill()  # its children notice
                    launcher.wait()


def _wait_until_ready(launcher: subprocess.Popen[bytes], log: int) -> str:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        ended = launcher.poll() is not None
        output = _read(log)
        if banner := _BANNER.search(output):
            return banner[1].decode()
        if ended or time.monotonic() > deadline_s:
            raise RuntimeError(f"the server did not start:\n{output.decode(errors='replace')}")
        time.sleep(_POLL_S)


def _read(file: int) -> bytes:
    with open(f"/proc/self/fd/{file}", "rb") as stream:
        return stream.read()


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """SIGTERM runs our ``finally`` blocks too, so that no server is left behind."""

    def unwind(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    old = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
