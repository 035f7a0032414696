"""Starting child processes and watching over each of them. Launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tokservice
from tokservice.runtime.config import Config
from tokservice.runtime.process import CONFIG_FILE, ProcessName
from tokservice.runtime.restart import RestartPolicy
from tokservice.wire.messages import Hello, Role

MODULES = {
    Role.API: "api.api_proc",
    Role.ROUTER: "tokservice.router.router_proc",
    Role.TOKENIZER: "tokservice.tokenizer.tokenizer_proc",
    Role.DETOKENIZER: "tokservice.detokenizer.detokenizer_proc",
    Role.ENGINE: "engine.engine_proc",
}
# Whoever computes here encodes one text at a time: threads of their own would only take the cores from others.
SINGLE_THREADED = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
ENVIRONMENT: dict[Role, Mapping[str, str]] = {Role.TOKENIZER: SINGLE_THREADED, Role.DETOKENIZER: SINGLE_THREADED}


def slots(config: Config) -> list[tuple[Role, int]]:
    """All processes of a deployment, in the order in which they are started."""
    counts = {
        Role.ROUTER: 1,
        Role.API: config.api.processes,
        Role.ENGINE: config.engine.processes,
        Role.TOKENIZER: config.tokenizer.workers,
        Role.DETOKENIZER: config.detokenizer.workers,
    }
    return [(role, slot) for role, count in counts.items() for slot in range(count)]


@dataclass(slots=True)
class Child:
    """One slot: its present process, if there is one, and what it has said."""

    role: Role
    slot: int
    incarnation: int = 0
    process: subprocess.Popen[bytes] | None = None
    hello: Hello | None = None  # of the present process, once it is ready
    doing: str = ""  # until then, where it tells
    last_beat_s: float = 0.0
    progress: int = 0
    unfinished: int = 0
    draining: bool = False
    topology_version: int = 0
    start_at_s: float = 0.0  # when there is no process
    last_end: str = ""  # how the last one ended
    restarts: RestartPolicy = field(default_factory=RestartPolicy)

    @property
    def name(self) -> ProcessName:
        """Of the present or last process."""
        return ProcessName(self.role, self.slot, self.incarnation)

    @property
    def identity(self) -> str:
        """Of the present or last process."""
        return self.name.identity

    def start(self, run_dir: Path, parent_pipe: int, environment: Mapping[str, str], now_s: float) -> None:
        """Start a fresh interpreter: its own process group, so that Ctrl-C does not reach it, in our session."""
        self.incarnation += 1
        self.hello = None
        self.doing = ""
        self.progress = self.unfinished = self.topology_version = 0
        self.draining = False
        self.last_beat_s = now_s
        root = str(Path(tokservice.__file__).parent.parent)
        inherited = {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
        arguments = ["--config", str(run_dir / CONFIG_FILE), "--slot", str(self.slot)]
        self.process = subprocess.Popen(
            # -P: a folder named `engine` or `api` in the current directory is not ours.
            [sys.executable, "-P", "-m", MODULES[self.role], *arguments, "--incarnation", str(self.incarnation)],
            stdin=parent_pipe,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            env={**os.environ, **inherited, **ENVIRONMENT.get(self.role, {}), **environment},
        )

    def exit_text(self) -> str:
        """How the process ended, in words."""
        code = self.process.returncode if self.process is not None else 0
        return f"killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """SIGKILL, and wait."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
