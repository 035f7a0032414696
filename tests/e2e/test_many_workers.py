"""Several processes of each kind give what one of each gives; pools of any size start; what keeps ending is named."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.server import SIMULATED, Server, running_server
from tests.helpers.tiny_tokenizers import byte_level, write_model
from tests.helpers.wait import wait_for

NUM_SCRAPES = 30
COUNTER = re.compile(r"^(tokservice_\w+(?:_total|_count|_bucket)(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)


def start(*settings: str) -> tuple[str, ...]:
    return (*SIMULATED, *(part for name in settings for part in ("--set", name)))


@pytest.fixture(scope="module")
def many() -> Iterator[Server]:
    pools = ("api.processes=2", "tokenizer.workers=3", "detokenizer.workers=2", "engine.processes=2")
    with running_server(*start(*pools, "simulated.step_ms=5")) as server:
        yield server


def ask(server: Server, request: dict[str, Any]) -> Any:
    """On a connection of its own, and so at any of the API processes."""
    answer = server.http.post("/v1/completions", json=request)
    assert answer.status_code == 200, answer.text
    return [(choice["index"], choice["text"], choice["finish_reason"]) for choice in answer.json()["choices"]]


def test_batches_find_their_way_back(many: Server, simulated: Server) -> None:
    """The return address was missing on batches, which failed once several workers ran: sglang#29024."""
    requests = [
        {
            "prompt": [f"One {index}", "Two", f"Three {index}"],
            "n": 2,
            "max_tokens": 30,
            "seed": index,
            "temperature": 1.0,
        }
        for index in range(24)
    ]
    with ThreadPoolExecutor(12) as clients:
        answers = list(clients.map(lambda request: ask(many, request), requests))
        assert answers == list(clients.map(lambda request: ask(simulated, request), requests))
    assert all([index for index, _, _ in choices] == list(range(6)) for choices in answers)


def counters(server: Server) -> dict[str, float]:
    """By name and labels, as any of the API processes tells."""
    return {name: float(value) for name, value in COUNTER.findall(server.metrics())}


def num_answers(page: dict[str, float]) -> float:
    return sum(value for name, value in page.items() if name.startswith("tokservice_http_requests_total"))


def test_any_scrape_sees_the_whole(many: Server) -> None:
    """Each worker kept its own counters, so that scrapes jumped between partial values: litellm#10595. They count the
    dead too. (A page may reach one API process a moment later than the other.)"""
    seen = first = counters(many)

    def newer() -> dict[str, float] | None:
        now = counters(many)
        return now if all(now.get(name, 0.0) >= value for name, value in seen.items()) else None

    for number in range(NUM_SCRAPES):
        ask(many, {"prompt": "Hello", "max_tokens": 2})
        if number == NUM_SCRAPES // 2:
            os.kill(many.pid("tokenizer", 1), signal.SIGKILL)
            os.kill(many.pid("detokenizer", 1), signal.SIGKILL)
        seen = wait_for(newer, what="a page that takes nothing back")
    wait_for(lambda: num_answers(counters(many)) >= num_answers(first) + NUM_SCRAPES, what="all are counted together")
    many.wait_until_status("/ready", 200)


@pytest.mark.parametrize("workers", [1, *(pytest.param(many, marks=pytest.mark.slow) for many in (10, 16))])
def test_pools_of_any_size_start(tmp_path: Path, workers: int) -> None:
    """With ten workers one never started, and was restarted for ever: sglang#10121."""
    folder = write_model(tmp_path / "tiny", byte_level())
    with running_server(*start(f"tokenizer.workers={workers}"), "--model", str(folder)) as server:
        assert {slot for role, slot in server.pids() if role == "tokenizer"} == set(range(workers))
        assert "process ended" not in server.log
        ask(server, {"prompt": "Hello", "max_tokens": 2})


def test_a_worker_that_keeps_ending_is_named_and_not_started_without_pause(tmp_path: Path) -> None:
    """The tokenizer's file is spoilt while the server runs: the HTTP process goes on, readiness says why it is not
    ready, restarts back off; and when the file is mended, so is the server."""
    folder = write_model(tmp_path / "tiny", byte_level())
    file = folder / "tokenizer.json"
    whole = file.read_text()
    with running_server(*start("tokenizer.workers=1"), "--model", str(folder)) as server:
        file.write_text("{ not JSON")
        os.kill(server.pid("tokenizer"), signal.SIGKILL)

        def complaint() -> str:
            return reason if "keeps ending" in (reason := server.why_not_ready()) else ""

        assert "tokenizer.json" in wait_for(complaint, what="the crash loop is named")
        assert server.http.get("/health").status_code == 200
        pauses = [float(pause) for pause in re.findall(r"identity=tokenizer\S* .*restart_in_s=(\S+)", server.log)]
        assert pauses == sorted(pauses)
        assert pauses[-1] >= 1.0
        file.write_text(whole)
        server.wait_until_status("/ready", 200)
        ask(server, {"prompt": "Hello", "max_tokens": 2})
