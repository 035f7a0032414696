"""What a server that encodes in its HTTP process does to its event loop. A process of its own for each way.

    python scripts/_encode_in_process.py

Reads a plan in JSON: {how, tokenizer, seconds, num_streams, scenarios: [{name, clients: [[number, prompts], ...]}]}.
On one uvloop there are streams that tick every 20 ms, the heartbeat that the HTTP process of this project has too,
and clients that have prompts encoded, each the next one as soon as the last is done. Prints one JSON line: for each
scenario the histogram of the heartbeat's lag, and how many prompts were encoded.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop
from _scrape import Histogram
from tokenizers import Tokenizer

from api.loop_lag import LoopLag
from tokservice.runtime.metrics import LOOP_LAG, Metrics

NUM_STREAMS = 32
STEP_S = 0.02
HEARTBEAT_S = 0.001
SETTLE_S = 0.5
TIMEOUT_S = 300.0

Encode = Callable[[str], Awaitable[list[int]]]
Clients = Sequence[tuple[int, Sequence[str]]]  # groups: how many, and the prompts that they take in turn


def encode_in_process(
    how: str, folder: Path, scenarios: Mapping[str, Clients], seconds: float, num_streams: int = NUM_STREAMS
) -> dict[str, tuple[Histogram, int]]:
    """Have a process encode; the lag and the number of prompts by scenario. Raises subprocess.SubprocessError."""
    plan = {
        "how": how,
        "tokenizer": str(folder / "tokenizer.json"),
        "seconds": seconds,
        "num_streams": num_streams,
        "scenarios": [{"name": name, "clients": clients} for name, clients in scenarios.items()],
    }
    run = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(plan),
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    return {
        name: (Histogram((*LOOP_LAG, math.inf), tuple(found["lag_counts"])), found["num_prompts"])
        for name, found in json.loads(run.stdout).items()
    }


# --- the process itself ---------------------------------------------------------------------------------------


def main() -> int:
    """Run the plan."""
    print(json.dumps(uvloop.run(_run(json.load(sys.stdin)))))
    return 0


async def _run(plan: dict[str, Any]) -> dict[str, Any]:
    encode = _encoder(plan["how"], Tokenizer.from_file(plan["tokenizer"]))
    await encode("Warm up.")
    metrics = Metrics()
    LoopLag(asyncio.get_running_loop(), HEARTBEAT_S, metrics)
    streams = [asyncio.create_task(_stream()) for _ in range(plan["num_streams"])]
    found = {
        scenario["name"]: await _scenario(scenario, encode, metrics, plan["seconds"]) for scenario in plan["scenarios"]
    }
    for stream in streams:
        stream.cancel()
    return found


async def _scenario(scenario: dict[str, Any], encode: Encode, metrics: Metrics, seconds: float) -> dict[str, Any]:
    num_encoded = itertools.count()
    running = True

    async def client(prompts: Iterator[str]) -> None:
        while running:
            await encode(next(prompts))
            next(num_encoded)
            await asyncio.sleep(0)

    clients = [
        asyncio.create_task(client(source))
        for number, prompts in scenario["clients"]
        for source in (itertools.cycle(prompts),)
        for _ in range(number)
    ]
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
