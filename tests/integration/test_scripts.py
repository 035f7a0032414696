"""The scripts as a user runs them, against a real server with the simulated engine."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.server import SIMULATED, Server, running_server
from tests.helpers.tiny_tokenizers import byte_level, write_model

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
API_KEY = "k-1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of a model folder that holds nothing but a tokenizer's files; it wants an API key."""
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny", byte_level())
    settings = ("--model", str(folder), "--api-key", API_KEY, "--set", "simulated.step_ms=5")
    with running_server(*SIMULATED, *settings) as running:
        yield running


@pytest.fixture
def nobody() -> Iterator[str]:
    """The URL of a port where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def run(script: str, *arguments: str, timeout_s: float = 110.0) -> subprocess.CompletedProcess[str]:
    """The script, to its end."""
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


@pytest.fixture(scope="module", autouse=True)
def chaos(request: pytest.FixtureRequest) -> Iterator[Future[subprocess.CompletedProcess[str]] | None]:
    """Begun before the other tests here, and beside them: it waits most of the time, and none of them measures."""
    if not any(item.name == test_a_short_run_of_chaos.__name__ for item in request.session.items):
        yield None
        return
    schedule = ("--seconds", "6", "--seed", "6", "--kill", "1.5", "--stop", "3", "--flood", "3")
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(run, "chaos.py", *schedule, timeout_s=280.0)


def load_test(server: Server, *arguments: str, key: str = API_KEY) -> tuple[dict[str, Any], int]:
    """The last line of its output, which is all that a program needs to read, and the exit code."""
    result = run("load_test.py", "--url", server.url, "--api-key", key, *arguments)
    assert result.stdout, result.stderr
    record: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return record, result.returncode


WITHOUT_PSUTIL = "import runpy, sys; sys.modules['psutil'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"


@pytest.mark.parametrize("script", ["chaos.py", "bench_recovery.py"])
def test_a_package_of_an_extra_that_is_absent_is_one_line(script: str) -> None:
    """After ``make serve`` alone they ended with an ImportError's traceback."""
    command = [sys.executable, "-c", WITHOUT_PSUTIL, str(SCRIPTS / script)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPTS), *sys.path])}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert result.returncode == 1
    assert re.fullmatch(r"psutil is not installed: \S+ -m pip install --editable '\.\[test\]'\n", result.stderr)


@pytest.mark.parametrize("form", [(), ("--completion",)], ids=["chat", "completion"])
def test_stream_completion(server: Server, form: tuple[str, ...]) -> None:
    """The text on standard output, the figures on standard error; the model's name is asked of the server."""
    sampling = ("--max-tokens", "12", "--temperature", "0")
    result = run("stream_completion.py", "Hello there", "--url", server.url, "--api-key", API_KEY, *sampling, *form)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert re.fullmatch(r"\[12 tokens, TTFT \d+ ms, [\d.]+ tokens/s\]\n", result.stderr)


def test_stream_completion_says_what_is_wrong(server: Server, nobody: str) -> None:
    """One line and exit code 1: for a server's error, and where there is no server."""
    refused = run("stream_completion.py", "Hello", "--url", server.url, "--model", "tiny", "--api-key", "wrong")
    assert refused.returncode == 1
    assert refused.stderr.startswith("HTTP 401: ")
    assert refused.stderr.count("\n") == 1
    unreachable = run("stream_completion.py", "Hello", "--url", nobody)
    assert unreachable.returncode == 1
    assert unreachable.stderr.startswith(f"cannot reach {nobody}: ")
    assert unreachable.stderr.count("\n") == 1


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_load_test_counts_every_request_and_token(server: Server, api: str) -> None:
    """All that were asked for, no more; lag and CPU come from /metrics."""
    settings = ("--concurrency", "4", "--requests", "10", "--prompt-tokens", "50", "--max-tokens", "8")
    record, code = load_test(server, *settings, "--api", api)
    assert code == 0
    assert record["requests_ok"] == 10
    assert record["output_tokens"] == 80
    assert record["errors"] == {}
    assert 0 < record["ttft_s"]["p50"] <= record["ttft_s"]["max"] <= record["e2e_s"]["max"]
    assert record["itl_s"]["p50"] > 0
    assert 0 <= record["loop_lag_s"]["p50"] <= record["loop_lag_s"]["max"]
    assert record["loop_lag_beats"] > 0
    assert set(record["cpu_us_per_token"]) >= {"api.0", "router.0", "detokenizer.0", "engine.0"}
    assert min(record["cpu_us_per_token"].values()) >= 0


def test_load_test_ends_in_time(server: Server) -> None:
    """A duration cuts the last requests short: they are no errors, and their tokens count."""
    record, code = load_test(server, "--concurrency", "2", "--duration", "2", "--max-tokens", "100000")
    assert 2.0 <= record["wall_s"] < 100, "the requests would take minutes"
    assert (record["requests_ok"], record["requests_cut_short"], record["errors"]) == (0, 2, {})
    assert record["output_tokens"] > 0
    assert code == 1  # nothing succeeded


def test_load_test_names_errors_by_kind(server: Server, nobody: str) -> None:
    """Refused requests are counted by status; a server that cannot be asked anything is one line."""
    settings = ("--model", "no-such-model", "--concurrency", "2", "--requests", "6")
    for key, error in ((API_KEY, "HTTP 404"), ("wrong", "HTTP 401")):
        record, code = load_test(server, *settings, key=key)
        assert (code, record["errors"]) == (1, {error: 6})
    unreachable = run("load_test.py", "--url", nobody)
    assert unreachable.returncode == 1
    assert unreachable.stderr.count("\n") == 1


def test_load_test_counts_resets_apart() -> None:
    """A server that resets every connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [
            sys.executable,
            str(SCRIPTS / "load_test.py"),
            "--url",
            f"http://127.0.0.1:{listener.getsockname()[1]}",
        ]
        client = subprocess.Popen(
            [*command, "--model", "m", "--requests", "3", "--concurrency", "1"], stdout=subprocess.PIPE, text=True
        )
        listener.settimeout(90)
        for number in range(4):  # first it asks for /metrics
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                if number == 0:
                    connection.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                else:  # with linger 0, closing is a reset
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        output, _ = client.communicate(timeout=90)
    assert client.returncode == 1
    assert json.loads(output.splitlines()[-1])["errors"] == {"connection reset": 3}


@pytest.mark.slow
def test_bench_loop_lag_measures_every_way(tmp_path: Path) -> None:
    """All rows of all scenarios, once."""
    folder = write_model(tmp_path / "tiny", byte_level())
    result = run(
        "bench_loop_lag.py",
        "--tokenizer",
        str(folder),
        "--repeats",
        "1",
        "--seconds",
        "0.3",
        "--prompt-tokens",
        "1000",
        "5000",
    )
    assert result.returncode == 0, result.stderr
    rows = {(row["scenario"], row["how"]): row["runs"] for row in json.loads(result.stdout.splitlines()[-1])["rows"]}
    ways = {"loop", "executor_encode", "executor_batch", "whole"}
    assert {how for _, how in rows} == ways
    assert len(rows) == 3 * len(ways) + 2
    assert all(run["beats"] > 0 for runs in rows.values() for run in runs)


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(("overhead",), id="overhead"),
        pytest.param(("lag", "short", "capacity", "throughput", "growth"), id="others", marks=pytest.mark.slow),
    ],
)
def test_bench_front_end_measures_every_section(tmp_path: Path, sections: tuple[str, ...]) -> None:
    """The program itself, on small prompts and few streams: nothing fails, every figure is there, it draws."""
    folder = write_model(tmp_path / "tiny", byte_level())
    small = ("--tokenizer", str(folder), "--quick", "--seconds", "0.3", "--shrink", "50")
    picture = tmp_path / "curves.png"
    result = run("bench_front_end.py", *small, "--backends", "hf", "--only", ",".join(sections), "--png", str(picture))
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout.splitlines()[-1])
    assert tuple(record["sections"]) == sections
    for name, section in record["sections"].items():
        assert f"=== {name} (" in result.stdout
        assert all(check["value"] > 0 for check in section["checks"]), section["checks"]
    assert not re.findall(r'"errors": \{[^}]', result.stdout)
    if importlib.util.find_spec("matplotlib"):
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(300)
def test_a_short_run_of_chaos(chaos: Future[subprocess.CompletedProcess[str]]) -> None:
    """Kills, stops and floods while requests run: none is lost, wrong or an error, and nothing is left behind."""
    result = chaos.result()
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads(result.stdout.splitlines()[-1])
    assert record["requests"] == record["right"] + record["refused"] > 0
    assert record["right"] > 0
    assert min(sum(record["kills"].values()), record["floods"]) > 0
    assert record["left_behind"] == []
