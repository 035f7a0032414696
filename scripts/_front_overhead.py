"""Section "overhead": from an HTTP request to its first event, for a 100-token prompt and an engine without delay."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import uvloop
from _client import Answer, closed_loop
from _front import FRONT, SHORT_TOKENS, Record, Server, Setup, at_most, distribution
from _load import all_of, errors
from _processes import StopWatch
from _report import ms, significant, table

NUM_PROMPTS = 64
NUM_WARM = 32
NUM_REQUESTS = 1000  # one at a time
NUM_CLIENTS, NUM_EACH = 8, 100  # several at a time
COLUMNS = ("p50", "p90", "p99", "max")
EXPECTED_S = 0.002


def run(setup: Setup) -> Record:
    """One client, then eight."""
    with setup.server(simulated__step_ms=0) as server:
        record = uvloop.run(_measure(setup, server))
    return {**record, "checks": [at_most("median from request to first event", record["ttft"]["p50"], EXPECTED_S)]}


async def _measure(setup: Setup, server: Server) -> Record:
    requests = itertools.cycle([server.stream(prompt, 1) for prompt in setup.prompts.cuts(SHORT_TOKENS, NUM_PROMPTS)])
    await closed_loop(server.target, itertools.islice(requests, NUM_WARM), [])
    num_requests = setup.size(NUM_REQUESTS // 4 if setup.quick else NUM_REQUESTS)
    answers: list[Answer] = []
    before, watch = await server.page(), StopWatch(server.processes)
    await closed_loop(server.target, itertools.islice(requests, num_requests), answers)
    spent, after = watch.read(), await server.page()
    ttft_s = _ttft_s(answers)

    def mean(name: str) -> float:
        total, count = (after.total(f"{name}_{part}") - before.total(f"{name}_{part}") for part in ("sum", "count"))
        return total / count

    client_s = sum(ttft_s) / len(ttft_s)
    router_s, tokenize_s = mean("time_to_first_token_seconds"), mean("tokenize_seconds")
    return {
        "requests": len(ttft_s),
        "ttft": distribution(ttft_s),
        "hops_mean_s": {
            "client and API process, both ways": client_s - router_s,
            "tokenizer worker: parse, validate, encode": tokenize_s,
            "router to first bytes, but for that": router_s - tokenize_s,
        },
        "cpu_s_per_request": {role: value / len(answers) for role, value in spent.cpu_s.items()},
        "delay_s_per_request": {role: value / len(answers) for role, value in spent.delay_s.items()},
        "errors": dict(errors(answers)),
        "several_clients": await _several(setup, server, requests),
    }


async def _several(setup: Setup, server: Server, requests: Iterable[bytes]) -> Record:
    bodies = itertools.islice(requests, NUM_CLIENTS * setup.size(NUM_EACH))
    watch = StopWatch(server.processes)
    answers = await all_of(server.target, bodies, NUM_CLIENTS)
    spent = watch.read()
    return {
        "clients": NUM_CLIENTS,
        "requests_per_s": len(answers) / spent.wall_s,
        "ttft": distribution(_ttft_s(answers)),
        "front_cpu_s_per_request": sum(spent.cpu_s[role] for role in FRONT) / len(answers),
        "errors": dict(errors(answers)),
    }


def _ttft_s(answers: list[Answer]) -> list[float]:
    return [answer.first_s - answer.sent_s for answer in answers if answer.first_s]


def tables(record: Record) -> str:
    """For people."""
    several = record["several_clients"]
    rows = [
        (name, f"{count}", *(ms(ttft[column]) for column in COLUMNS))
        for name, count, ttft in (
            ("1 client", record["requests"], record["ttft"]),
            (f"{several['clients']} clients", "", several["ttft"]),
        )
    ]
    whole_s = sum(record["hops_mean_s"].values())
    hops = [(name, ms(value), f"{value / whole_s:.0%}") for name, value in record["hops_mean_s"].items()]
    cpu = [
        (role, significant(cpu_s * 1e6), significant(record["delay_s_per_request"][role] * 1e6))
        for role, cpu_s in record["cpu_s_per_request"].items()
    ]
    return "\n".join(
        [
            f"From request to first event, {SHORT_TOKENS}-token prompts, ms\n",
            table(("", "requests", *COLUMNS), rows),
            "",
            table(("hop (1 client)", "mean ms", "share"), hops),
            "",
            table(("process (1 client)", "CPU µs per request", "waits for a CPU, µs"), cpu),
            f"\n{several['clients']} clients: {significant(several['requests_per_s'])} requests/s,"
            f" {ms(several['front_cpu_s_per_request'])} ms of CPU per one-token request in the front end",
        ]
    )
