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
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.server import SIMULATED, Server, running_server

pytestmark = pytest.mark.timeout(300)

REPEATABLE = ("--generation-deterministic", "--seed", "1")
SHORT = "simulated.max_model_len=256"  # what asks for no number of tokens ends soon


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(*SIMULATED, "--set", "simulated.step_ms=1", "--set", SHORT) as server:
        yield server


def run(server: Server, folder: Path, *options: str, timeout_s: int = 200) -> None:
    """A run in an empty folder; fails with its report. Bounded by what it asks, not by time, so the same everywhere."""
    before = server.pids()
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--no-color"]
    command += ["--exclude-checks", "positive_data_acceptance", "--request-timeout", "90"]
    command += ["--output-sanitize", "false", *options]
    environment = os.environ | {"NO_PROXY": "*"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Selected: " in done.stdout
    assert server.pids() == before, "no process was lost"
    assert server.http.get("/ready").status_code == 200


SHORT_RUNS = {
    "random requests": ("--phases", "examples,fuzzing", "--max-examples", "12"),
    "every rule": ("--phases", "coverage", "--include-path-regex", "tokenize|count_tokens"),
}


@pytest.fixture(scope="module")
def short_runs(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[None]]]:
    """At the same time: each has work for one core."""
    with ThreadPoolExecutor() as runs:
        yield {
            name: runs.submit(run, server, tmp_path_factory.mktemp("run"), *options, *REPEATABLE)
            for name, options in SHORT_RUNS.items()
        }


def test_random_requests_to_every_operation(short_runs: dict[str, Future[None]]) -> None:
    short_runs["random requests"].result()


def test_every_rule_of_small_schemas(short_runs: dict[str, Future[None]]) -> None:
    """A request for each rule of a schema, which it breaks or only just keeps."""
    short_runs["every rule"].result()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_rule_of_every_schema(server: Server, tmp_path: Path) -> None:
    run(server, tmp_path, "--phases", "coverage", "--continue-on-failure", *REPEATABLE, timeout_s=1100)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_long_run_finds_nothing(server: Server, tmp_path: Path) -> None:
    long = ("--max-time", "900", "--max-examples", "2000", "--continue-on-failure")
    run(server, tmp_path, "--phases", "examples,fuzzing", *long, timeout_s=2000)
