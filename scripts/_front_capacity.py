"""Section "capacity": output tokens through the whole front end, and what one costs in each process.

Streams that have begun, at 20 ms a step (50 tokens/s each) and with an engine that answers every millisecond; and,
for comparison with servers that were measured so, requests of 128 tokens one after the other, prompts and all.
Client, engine and front end share the machine's cores.
"""

from __future__ import annotations

import asyncio
import itertools
import time

import uvloop
from _client import Answer
from _front import ENDLESS, FRONT, SHORT_TOKENS, Record, Server, Setup, at_most
from _load import all_of, errors, in_flight, started
from _processes import Spent, StopWatch
from _report import significant, table

STREAMS = (1, 32, 256, 1000)
STEPS_MS = (20, 1)
SETTLE_S = 1.0
REQUEST_TOKENS = 128
ROUNDS = {32: 10, 256: 3}  # requests of each client
NUM_PROMPTS = 64
EXPECTED_S = 40e-6


def run(setup: Setup) -> Record:
    """All numbers of streams at both step times."""
    streams = STREAMS[:-1] if setup.quick else STREAMS
    rows: list[Record] = []
    for step_ms in STEPS_MS:
        with setup.server(simulated__step_ms=step_ms) as server:
            rows += [uvloop.run(_running(setup, server, setup.size(number), step_ms)) for number in streams]
            if step_ms == STEPS_MS[-1]:
                for number, rounds in ROUNDS.items():
                    rows.append(uvloop.run(_requests(setup, server, setup.size(number), 1 if setup.quick else rounds)))
    at_256 = [row for row in rows if row["streams"] == setup.size(256) and row["kind"] == "streams"]
    checks = [
        at_most(f"CPU per token, 256 streams, {row['step_ms']} ms a step", row["front_s_per_token"], EXPECTED_S, "µs")
        for row in at_256
    ]
    return {"rows": rows, "checks": checks}


async def _running(setup: Setup, server: Server, number: int, step_ms: float) -> Record:
    request = server.stream(setup.prompts.cut(SHORT_TOKENS), ENDLESS)
    async with in_flight(server.target, (number, [request])) as answers:
        await started(answers, number)
        await asyncio.sleep(SETTLE_S)
        watch, client_s, before = StopWatch(server.processes), time.process_time(), _events(answers)
        await asyncio.sleep(setup.seconds)
        spent, client_s, num_tokens = watch.read(), time.process_time() - client_s, _events(answers) - before
        failed = dict(errors(answers))
    await server.until_idle()
    return {
        "kind": "streams",
        "step_ms": step_ms,
        "streams": number,
        "errors": failed,
        **_costs(spent, num_tokens, client_s),
    }


async def _requests(setup: Setup, server: Server, number: int, rounds: int) -> Record:
    prompts = itertools.cycle(setup.prompts.cuts(SHORT_TOKENS, NUM_PROMPTS))
    requests = [server.stream(next(prompts), REQUEST_TOKENS) for _ in range(number * rounds)]
    watch, client_s = StopWatch(server.processes), time.process_time()
    answers = await all_of(server.target, requests, number)
    spent, client_s = watch.read(), time.process_time() - client_s
    return {
        "kind": f"requests of {REQUEST_TOKENS} tokens",
        "step_ms": STEPS_MS[-1],
        "streams": number,
        "errors": dict(errors(answers)),
        **_costs(spent, len(requests) * REQUEST_TOKENS, client_s),
    }


def _events(answers: list[Answer]) -> int:
    return sum(answer.num_events for answer in answers)


def _costs(spent: Spent, num_tokens: int, client_s: float) -> Record:
    front_s = sum(spent.cpu_s[role] for role in FRONT)
    return {
        "tokens_per_s": num_tokens / spent.wall_s,
        "s_per_token": {role: value / num_tokens for role, value in spent.cpu_s.items()},
        "front_s_per_token": front_s / num_tokens,
        "tokens_per_front_core_s": num_tokens / front_s,
        "cpu_share": spent.cpu_share,
        "delay_share": spent.delay_share,
        "client_cpu_share": client_s / spent.wall_s,
    }


def tables(record: Record) -> str:
    """For people."""
    roles = ("api", "router", "detokenizer", "tokenizer", "engine")
    rows = [
        (
            f"{row['streams']} {row['kind']}",
            f"{row['step_ms']}",
            significant(row["tokens_per_s"]),
            significant(row["tokens_per_front_core_s"]),
            significant(row["front_s_per_token"] * 1e6),
            *(significant(row["s_per_token"][role] * 1e6) for role in roles),
            f"{row['client_cpu_share']:.0%}",
            f"{sum(row['errors'].values())}",
        )
        for row in record["rows"]
    ]
    header = ("", "step ms", "tokens/s", "tokens per core s", "µs per token", *roles, "client's CPU", "errors")
    return "\n".join(
        [
            "Output tokens through the front end; CPU µs per token (all front-end processes, then each)\n",
            table(header, rows),
        ]
    )
