"""The promise: while long prompts are tokenized, the HTTP process's loop keeps ticking.

Bounds are generous, since the machine may be busy; ``scripts/bench_loop_lag.py`` has the exact figures. Encoding
the same prompts on the loop stops it for seconds.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

from tests.helpers.hiccups import ROUNDS, hiccups
from tests.helpers.server import SIMULATED, Server, running_server
from tests.helpers.wait import wait_for

PROMPT = "def encode(text: str) -> list[int]: return [len(word) for word in text.split()]  # a comment\n" * 1000
NUM_PROMPTS = 16
MAX_LAG_S = 0.1  # beyond what the machine itself is late


def lag_buckets(server: Server) -> dict[float, int]:
    """Heartbeats by upper bound of their lag in seconds, cumulative."""
    rows = re.findall(r'event_loop_lag_seconds_bucket\{process="api.0",le="([^"]+)"\} (\d+)', server.metrics())
    return {float(bound): int(count) for bound, count in rows}


def fresh_lag_buckets(server: Server) -> dict[float, int]:
    """Of all that has been: the page is renewed now and then, and the second one from here knows it."""
    for _ in range(2):
        told = lag_buckets(server)
        wait_for(lambda told=told: lag_buckets(server) != told, what="newer counts")  # type: ignore[misc]
    return lag_buckets(server)


def complete(server: Server, prompt: str) -> int:
    answer = server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    return int(answer.json()["usage"]["prompt_tokens"])


def test_the_loop_ticks_while_sixteen_long_prompts_are_tokenized() -> None:
    with running_server(*SIMULATED, "--set", "api.lag_heartbeat_ms=1") as server:
        complete(server, "warm")
        for _ in range(ROUNDS):
            before = fresh_lag_buckets(server)
            with ThreadPoolExecutor(NUM_PROMPTS) as clients, hiccups() as machine_is_late_s:
                counts = list(clients.map(lambda _: complete(server, PROMPT), range(NUM_PROMPTS)))
                bound_s = MAX_LAG_S + machine_is_late_s()
            assert min(counts) > 20_000
            during = {bound: count - before[bound] for bound, count in fresh_lag_buckets(server).items()}
            ticks = max(during.values())
            assert ticks > 10, "the heartbeat went on"
            late = ticks - min(count for bound, count in during.items() if bound >= bound_s)
            if not late:
                return
    raise AssertionError(f"{late} of {ticks} heartbeats were more than {bound_s:.3f} s late: {during}")
