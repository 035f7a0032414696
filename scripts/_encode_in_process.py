"""What a server that encodes in its HTTP process does to its event loop. A process of its own for each way.

    python scripts/_encode_in_process.py PLAN

PLAN is a JSON file: {how, tokenizer, seconds, scenarios: [{name, num_clients, prompts}]}. On one uvloop there are
32 streams that tick every 20 ms, the heartbeat that the HTTP process of this project has too, and clients that
have prompts encoded, each the next one as soon as the last is done. Prints one JSON line: for each scenario the
histogram of the heartbeat's lag, and how many prompts were encoded.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop
from _scrape import Histogram
from tokenizers import Tokenizer

from api.loop_lag import LoopLag
from tokservice.runtime.metrics import Metrics

NUM_STREAMS = 32
STEP_S = 0.02
HEARTBEAT_S = 0.001
SETTLE_S = 0.5

Encode = Callable[[str], Awaitable[list[int]]]


def main() -> int:
    """Run the plan."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps(uvloop.run(_run(plan))))
    return 0


async def _run(plan: dict[str, Any]) -> dict[str, Any]:
    encode = _encoder(plan["how"], Tokenizer.from_file(plan["tokenizer"]))
    await encode("Warm up.")
    metrics = Metrics()
    LoopLag(asyncio.get_running_loop(), HEARTBEAT_S, metrics)
    streams = [asyncio.create_task(_stream()) for _ in range(NUM_STREAMS)]
    found = {
        scenario["name"]: await _scenario(scenario, encode, metrics, plan["seconds"]) for scenario in plan["scenarios"]
    }
    for stream in streams:
        stream.cancel()
    return found


async def _scenario(scenario: dict[str, Any], encode: Encode, metrics: Metrics, seconds: float) -> dict[str, Any]:
    prompts = itertools.cycle(scenario["prompts"])
    num_encoded = itertools.count()
    running = True

    async def client() -> None:
        while running:
            await encode(next(prompts))
            next(num_encoded)
            await asyncio.sleep(0)

    clients = [asyncio.create_task(client()) for _ in range(scenario["num_clients"])]
    await asyncio.sleep(SETTLE_S)
    before, encoded_before = Histogram.of_lag(metrics), next(num_encoded)
    await asyncio.sleep(seconds)
    lag, encoded = Histogram.of_lag(metrics) - before, next(num_encoded) - encoded_before - 1
    running = False
    await asyncio.gather(*clients)
    return {"lag_counts": lag.counts, "num_prompts": encoded}


async def _stream() -> None:
    while True:
        await asyncio.sleep(STEP_S)


def _encoder(how: str, tokenizer: Tokenizer) -> Encode:
    def with_gil(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    def without_gil(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode_batch_fast([text])[0].ids
        return ids

    async def on_loop(text: str) -> list[int]:
        return with_gil(text)

    loop = asyncio.get_running_loop()
    return {
        "loop": on_loop,
        "executor_encode": lambda text: loop.run_in_executor(None, with_gil, text),
        "executor_batch": lambda text: loop.run_in_executor(None, without_gil, text),
    }[how]


if __name__ == "__main__":
    sys.exit(main())
