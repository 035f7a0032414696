"""The promise: while long prompts are tokenized, the HTTP process's loop keeps ticking.

Bounds are generous, since the machine may be busy; ``scripts/bench_loop_lag.py`` has the exact figures. Encoding
the same prompts on the loop stops it for seconds.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.helpers.server import SIMULATED, Server, running_server
from tests.helpers.wait import wait_for

PROMPT = "def encode(text: str) -> list[int]: return [len(word) for word in text.split()]  # a comment\n" * 1000
NUM_PROMPTS = 16
MAX_LAG_S = 0.1


def lag_buckets(server: Server) -> dict[float, int]:
    """Heartbeats by upper bound of their lag in seconds, cumulative."""
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    rows = re.findall(r'event_loop_lag_seconds_bucket\{process="api.0",le="([^"]+)"\} (\d+)', text)
    return {float(bound): int(count) for bound, count in rows}


def complete(url: str, prompt: str) -> int:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 1}, timeout=60, trust_env=False)
    return int(answer.json()["usage"]["prompt_tokens"])


def test_the_loop_ticks_while_sixteen_long_prompts_are_tokenized() -> None:
    with running_server(*SIMULATED, "--set", "api.lag_heartbeat_ms=1") as server:
        complete(server.url, "warm")
        before = lag_buckets(server)
        with ThreadPoolExecutor(NUM_PROMPTS) as clients:
            counts = list(clients.map(lambda _: complete(server.url, PROMPT), range(NUM_PROMPTS)))
        assert min(counts) > 20_000
        for _ in range(2):  # the page is renewed now and then: the second one from here tells of all that was
            told = lag_buckets(server)
            wait_for(lambda told=told: lag_buckets(server) != told, what="newer counts")  # type: ignore[misc]
        during = {bound: count - before[bound] for bound, count in lag_buckets(server).items()}
    ticks = max(during.values())
    assert ticks > 100, "the heartbeat went on"
    late = ticks - min(count for bound, count in during.items() if bound >= MAX_LAG_S)
    assert late == 0, f"{late} of {ticks} heartbeats were more than {MAX_LAG_S} s late: {during}"
