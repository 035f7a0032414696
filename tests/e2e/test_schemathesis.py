"""``schemathesis`` against /openapi.json: every operation is called with what its schema allows, and what it does not.

It looks for 500s, for answers and events that are not as described, for undescribed statuses and media types, and for
bodies that are accepted though their schema forbids them. The opposite it cannot tell: whether ids are in the
vocabulary, a prompt fits, or a grammar is one, no schema says.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.server import SIMULATED, Server, running_server

pytestmark = pytest.mark.timeout(300)

SHORT = "simulated.max_model_len=256"  # what asks for no number of tokens ends soon


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(*SIMULATED, "--set", "simulated.step_ms=1", "--set", SHORT) as server:
        yield server


def run(server: Server, folder: Path, max_time_s: int, *options: str) -> None:
    """A run in an empty folder; fails with its report."""
    before = server.pids()
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--no-color"]
    command += ["--phases", "examples,coverage,fuzzing", "--exclude-checks", "positive_data_acceptance"]
    command += ["--max-time", str(max_time_s), "--request-timeout", "60", "--output-sanitize", "false", *options]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"NO_PROXY": "*"},
        capture_output=True,
        text=True,
        timeout=2 * max_time_s + 60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Selected: " in done.stdout
    assert server.pids() == before, "no process was lost"
    assert httpx.get(f"{server.url}/ready", trust_env=False).status_code == 200


def test_a_short_run_finds_nothing(server: Server, tmp_path: Path) -> None:
    run(server, tmp_path, 20, "--max-examples", "10", "--generation-deterministic", "--seed", "1")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_long_run_finds_nothing(server: Server, tmp_path: Path) -> None:
    run(server, tmp_path, 900, "--max-examples", "2000", "--continue-on-failure")
