"""Section "throughput": prompts through the tokenizer pool, beside the libraries alone in one thread.

Whole requests of one token, 16 at a time. Most words of a text are known from earlier ones, as in service: libraries
remember them. A body above ``router.long_body_bytes`` is exclusive, and of two workers
one never takes those: only the shorter prompts use both.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Callable

import uvloop
from _front import Record, Server, Setup, at_least
from _load import errors, in_flight
from _processes import StopWatch
from _report import significant, table
from tokenizers import Tokenizer

NUM_CLIENTS = 16
LENGTHS = {"10k": 10_000, "22k": 22_000}
NUM_TEXTS = 16
WORKERS = (1, 2)
SETTLE_S = 0.5
EXPECTED_TIMES = 10


def run(setup: Setup) -> Record:
    """The libraries alone first, then the pool."""
    alone = {name: _alone(setup, encode) for name, encode in _libraries(setup).items()}
    rows: list[Record] = []
    for backend in setup.backends:
        for workers in WORKERS:
            with setup.server(tokenizer__backend=backend, tokenizer__workers=workers, simulated__step_ms=0) as server:
                for name, length in LENGTHS.items():
                    found = uvloop.run(_pool(setup, server, setup.size(length)))
                    rows.append({"backend": backend, "workers": workers, "prompts": name, **found})
    fastest = max((row["tokens_per_s"] for row in rows if row["backend"] == "fastokens"), default=0.0)
    plain = max(alone[name]["tokens_per_s"] for name in alone if name.startswith("tokenizers"))
    checks = [at_least("pool with fastokens over tokenizers in one thread", fastest / plain, EXPECTED_TIMES)]
    return {"alone": alone, "pool": rows, "checks": checks if fastest else []}


def _libraries(setup: Setup) -> dict[str, Callable[[str], object]]:
    path = str(setup.folder / "tokenizer.json")
    reference = Tokenizer.from_file(path)
    found: dict[str, Callable[[str], object]] = {
        "tokenizers, encode": lambda text: reference.encode(text).ids,
        "tokenizers, encode_batch_fast": lambda text: reference.encode_batch_fast([text])[0].ids,
    }
    if "fastokens" in setup.backends and importlib.util.find_spec("fastokens"):
        from tokservice.tokenizer.fastokens_backend import FastokensBackend

        fast = FastokensBackend(setup.folder / "tokenizer.json")
        found["fastokens"] = lambda text: fast.encode(text, add_special_tokens=True)
    return found


def _alone(setup: Setup, encode: Callable[[str], object]) -> Record:
    length = setup.size(LENGTHS["22k"])
    texts = setup.prompts.cuts(length, NUM_TEXTS)
    encode(texts[0])
    start_s, num_texts, num_bytes = time.perf_counter(), 0, 0
    while time.perf_counter() - start_s < setup.seconds:
        text = texts[num_texts % NUM_TEXTS]
        encode(text)
        num_texts += 1
        num_bytes += len(text.encode())
    wall_s = time.perf_counter() - start_s
    return {"bytes_per_s": num_bytes / wall_s, "tokens_per_s": num_texts * length / wall_s}


async def _pool(setup: Setup, server: Server, length: int) -> Record:
    texts = setup.prompts.cuts(length, NUM_TEXTS)
    mean_bytes = sum(len(text.encode()) for text in texts) / NUM_TEXTS
    async with in_flight(server.target, (NUM_CLIENTS, [server.plain(text) for text in texts])) as answers:
        await asyncio.sleep(SETTLE_S)
        watch, number = StopWatch(server.processes), sum(one.whole for one in answers)
        await asyncio.sleep(setup.seconds)
        spent, number = watch.read(), sum(one.whole for one in answers) - number
        failed = dict(errors(answers))
    await server.until_idle()
    return {
        "bytes_per_s": number * mean_bytes / spent.wall_s,
        "tokens_per_s": number * length / spent.wall_s,
        "requests_per_s": number / spent.wall_s,
        "bytes_per_tokenizer_core_s": number * mean_bytes / spent.cpu_s["tokenizer"],
        "cpu_share": spent.cpu_share,
        "errors": failed,
    }


def tables(record: Record) -> str:
    """For people."""
    plain = record["alone"]["tokenizers, encode_batch_fast"]["tokens_per_s"]
    rows = [(f"{name}, one thread", *_rates(found, plain), "", "", "") for name, found in record["alone"].items()]
    rows += [
        (
            f"pool: {row['backend']}, {row['workers']} workers, {row['prompts']} tokens",
            *_rates(row, plain),
            significant(row["bytes_per_tokenizer_core_s"] / 1e6),
            ", ".join(f"{role} {share:.0%}" for role, share in row["cpu_share"].items() if share > 0.05),
            f"{sum(row['errors'].values())}",
        )
        for row in record["pool"]
    ]
    header = ("", "MB/s", "tokens/s", "times encode_batch_fast", "MB per core s", "CPU", "errors")
    title = "Prompts through the tokenizer pool (MB per core second: of the tokenizers)\n"
    return "\n".join([title, table(header, rows)])


def _rates(found: Record, plain: float) -> tuple[str, str, str]:
    tokens_per_s = found["tokens_per_s"]
    return significant(found["bytes_per_s"] / 1e6), significant(tokens_per_s), significant(tokens_per_s / plain)
