"""The promise: while long prompts are tokenized, the HTTP process's loop keeps ticking.

Bounds are generous, since the machine may be busy; ``scripts/bench_loop_lag.py`` has the exact figures. Encoding
the same prompts on the loop stops it for seconds.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.helpers.server import SIMULATED, Server, running_server

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
        during = {bound: count - before[bound] for bound, count in lag_buckets(server).items()}
    assert min(counts) > 20_000
    ticks = max(during.values())
    assert ticks > 200, "the prompts took a while"
    late = ticks - min(count for bound, count in during.items() if bound >= MAX_LAG_S)
    assert late == 0, f"{late} of {ticks} heartbeats were more than {MAX_LAG_S} s late: {during}"
