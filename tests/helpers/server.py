"""The real system as a user starts it: ``scripts/launch.py`` in a process of its own."""

from __future__ import annotations

import ctypes
import re
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.helpers.http_client import RawClient
from tests.helpers.wait import wait_for

ROOT = Path(__file__).parent.parent.parent
SIMULATED = ("--config", str(ROOT / "configs" / "simulated.toml"))
LIBC = ctypes.CDLL(None)
TITLE = re.compile(r"tokservice: (\w+) (\d+)")
# Pages are made from heartbeats: frequent ones, and no test waits for long until a gauge is what it should be. The
# monitor of the loop's lag is most of what an idle server does, and several are idle beside each test.
SETTINGS = ("--port", "0", "--set", "runtime.heartbeat_s=0.2", "--set", "api.lag_heartbeat_ms=100")
ANSWER_TIMEOUT_S = 90.0  # only a fault takes so long


def die_with_parent() -> None:
    """Between fork and exec: a test run that is killed must not leave its servers behind (prctl, PR_SET_PDEATHSIG)."""
    LIBC.prctl(1, signal.SIGKILL)


class Server:
    """A started system; ``stop`` ends it and checks that nothing stays behind."""

    http: httpx.Client  # once it is ready: requests from any thread, each on a connection of its own

    def __init__(
        self, *arguments: str, env: dict[str, str] | None = None, verify: ssl.SSLContext | bool = True
    ) -> None:
        self.verify = verify  # how clients check a certificate
        self.output = Path(tempfile.mkstemp(prefix="server-", suffix=".log")[1])
        self._temporary = tempfile.TemporaryDirectory(prefix="ts", dir="/tmp")
        self.run_dir = Path(self._temporary.name) / "run"
        settings = (*SETTINGS, "--set", f"runtime.run_dir={self.run_dir}")
        with self.output.open("wb") as log:
            self.process = psutil.Popen(
                [sys.executable, str(ROOT / "scripts" / "launch.py"), *settings, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
            )
        self.url = ""

    @property
    def log(self) -> str:
        """All that the processes have printed."""
        return self.output.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        """Until the banner names the address and /ready agrees."""

        def banner() -> re.Match[str] | None:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with code {self.process.returncode}:\n{self.log}")
            return re.search(r"is ready at (https?://\S+)", self.log)

        self.url = wait_for(banner, 100.0, "the server is ready").group(1)
        self.http = httpx.Client(
            base_url=self.url,
            timeout=ANSWER_TIMEOUT_S,
            trust_env=False,
            verify=self.verify if self.url.startswith("https:") else False,  # to load authorities takes 10 ms and more
            # Every request on its own connection, which "close" ends at once: left to the pool of httpcore, it stays
            # idle for a moment in which one thread may take it while another closes it (EBADF).
            headers={"connection": "close"},
            limits=httpx.Limits(max_connections=None),
        )
        self.wait_until_status("/ready", 200)

    def wait_until_status(self, path: str, status: int) -> None:
        """Until a page answers with a status."""
        wait_for(lambda: self.http.get(path).status_code == status, what=f"{path} says {status}")

    def why_not_ready(self) -> str:
        """The reason that /ready gives; '' where it says ready."""
        page = self.http.get("/ready")
        return str(page.json()["reason"]) if page.status_code == 503 else ""

    def pid(self, role: str, slot: int = 0) -> int:
        """Of a living process."""
        return wait_for(lambda: self.pids().get((role, slot)), what=f"{role} {slot} lives")

    def pids(self) -> dict[tuple[str, int], int]:
        """Of all living processes, by role and slot, as their titles say."""
        found = {}
        for child in self.process.children(recursive=True):
            try:
                match = TITLE.search(" ".join(child.cmdline()))
            except psutil.Error:
                continue
            if match:
                found[match[1], int(match[2])] = child.pid
        return found

    def connect(self) -> RawClient:
        """A connection on which the test says every byte."""
        return RawClient(("127.0.0.1", int(self.url.rpartition(":")[2])))

    def sockets(self) -> set[str]:
        """Those in the run directory."""
        return {path.name for path in self.run_dir.iterdir() if path.is_socket()}

    def metrics(self) -> str:
        """The supervisor's page as it is now."""
        return self.http.get("/metrics").text

    def gauge(self, name: str) -> float:
        """The value of a metric without labels, as the supervisor's page has it now."""
        match = re.search(rf"^tokservice_{name}(?:\{{[^}}]*\}})? (\S+)$", self.metrics(), re.MULTILINE)
        return float(match[1]) if match else 0.0

    @contextmanager
    def begun_stream(self, body: dict[str, Any]) -> Iterator[Iterator[str]]:
        """The further lines of a streamed completion, once the first one has come."""
        body = {**body, "stream": True}
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            yield lines

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it with a signal; the exit code. Fails where a process or a socket stays behind."""
        children = self.process.children(recursive=True) if self.process.is_running() else []
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(90)
        _, alive = psutil.wait_procs(children, timeout=30)
        for child in alive:
            child.kill()
        assert not alive, f"processes outlived their launcher: {alive}"
        return int(code)

    def discard(self) -> None:
        """Whatever happened: leave nothing on this machine."""
        if self.url:
            self.http.close()
        if self.process.poll() is None:
            for child in self.process.children(recursive=True):
                child.kill()
            self.process.kill()
            self.process.wait(30)
        self._temporary.cleanup()
        self.output.unlink(missing_ok=True)


@contextmanager
def running_server(
    *arguments: str, env: dict[str, str] | None = None, verify: ssl.SSLContext | bool = True, ready: bool = True
) -> Iterator[Server]:
    """A server for one test, stopped at its end; with ``ready`` False it is only started."""
    server = Server(*arguments, env=env, verify=verify)
    try:
        if ready:
            server.wait_until_ready()
        yield server
        if server.process.poll() is None:
            server.stop()
    finally:
        server.discard()
