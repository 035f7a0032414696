"""More than the system can take: everybody gets an answer, and probes are not mistaken about its health."""

from __future__ import annotations

import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait

import httpx

from tests.helpers.server import SIMULATED, Server, running_server
from tests.helpers.wait import wait_for

MAX_UNFINISHED = 8
NUM_REQUESTS = 120
NOTICED_S = 20.0  # of a death; a missed heartbeat would show after thirty


def options(*settings: str) -> tuple[str, ...]:
    return tuple(part for name in settings for part in ("--set", name))


def test_every_request_of_a_flood_is_answered(small: tuple[str, ...]) -> None:
    """With more than one tokenizer worker, requests that a full queue refused never got any reply: sglang#33858."""
    limits = (f"router.max_unfinished_requests={MAX_UNFINISHED}", "tokenizer.workers=3", "simulated.step_ms=50")
    with running_server(*small, *options(*limits)) as server:

        def ask(index: int) -> httpx.Response:
            """Whoever is let in stays for a second: the others find it full."""
            request = {"prompt": f"Question {index}", "max_tokens": 20, "stream": index % 2 == 0}
            return server.http.post("/v1/completions", json=request)

        with ThreadPoolExecutor(64) as clients:
            answers = list(clients.map(ask, range(NUM_REQUESTS)))
        statuses = Counter(answer.status_code for answer in answers)
        assert set(statuses) == {200, 429}
        assert statuses.total() == NUM_REQUESTS
        for index, answer in enumerate(answers):
            if answer.status_code == 429:
                assert answer.json()["error"]["code"] == "overloaded"
                assert int(answer.headers["retry-after"]) > 0
            elif index % 2 == 0:
                assert answer.text.endswith("data: [DONE]\n\n")
            else:
                assert answer.json()["usage"]["completion_tokens"] == 20
        wait_for(lambda: server.gauge("num_requests_unfinished") == 0, what="nothing is left")
        assert server.http.post("/v1/completions", json={"prompt": "After", "max_tokens": 1}).status_code == 200


def test_a_busy_engine_is_healthy_though_no_token_comes() -> None:
    """Health that waited for a token took long prefills for death: sglang#22511."""
    limits = ("runtime.stall_timeout_s=2", "runtime.busy_stall_timeout_s=60")
    with (
        running_server(*SIMULATED, *options(*limits, "simulated.prefill_tokens_per_s=3000")) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        long = {"prompt": "word " * 6000, "max_tokens": 1}  # two of these: four seconds without a token
        answers = [pool.submit(server.http.post, "/v1/completions", json=long) for _ in range(2)]
        wait_for(lambda: server.gauge("num_requests_running") > 0, what="they run")
        while wait(answers, timeout=0.05).not_done:
            for path in ("/health", "/ready"):
                page = server.http.get(path)
                assert page.status_code == 200, page.text
        assert [answer.result().status_code for answer in answers] == [200, 200]


def test_a_dead_engine_is_noticed_whatever_the_traffic(small: tuple[str, ...]) -> None:
    """Health took any recent traffic for proof of life, and stayed at 200 after the scheduler had crashed:
    sglang#6624."""
    with running_server(*small, *options("simulated.step_ms=10")) as server, ThreadPoolExecutor(8) as clients:
        request = {"prompt": "Hello", "max_tokens": 100, "ignore_eos": True}
        answers = [clients.submit(server.http.post, "/v1/completions", json=request) for _ in range(16)]
        wait_for(lambda: server.gauge("num_requests_running") > 0, what="they run")
        os.kill(server.pid("engine"), signal.SIGKILL)
        wait_for(lambda: server.why_not_ready().startswith("engine 0 "), NOTICED_S, "the death is noticed")
        assert [answer.result().status_code for answer in answers] == [200] * len(answers)
        server.wait_until_status("/ready", 200)


def test_refused_requests_leave_no_record(simulated: Server) -> None:
    """Each request that failed before its dispatch left its record behind, a batch with one bad member all of them:
    sglang#28380."""
    too_long = {"prompt": ["fine", "word " * 1_100_000, "fine"]}
    bad: tuple[dict[str, object], ...] = (
        {"prompt": "x", "temperature": -1},
        {"prompt": ["fine", [10**9]]},
        {"prompt": "x", "n": 2, "stop": [""]},
        {"prompt": "x", "model": "no-such-model"},
    )

    def ask(index: int) -> int:
        request = bad[index % len(bad)] if index else too_long
        return simulated.http.post("/v1/completions", json=request).status_code

    with ThreadPoolExecutor(16) as clients:
        statuses = Counter(clients.map(ask, range(100)))
    assert set(statuses) == {400, 404}
    wait_for(lambda: simulated.gauge("num_requests_unfinished") == 0, what="no record is left")
    assert simulated.gauge("unfinished_bytes") == 0
