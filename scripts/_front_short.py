"""Section "short": time to first token of 100-token prompts, alone and while prompts of 22k or of 100k tokens are kept
in flight. Two tokenizer workers; the engine answers within a millisecond, so that what is measured is the front end.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict

import uvloop
from _front import SHORT_TOKENS, Record, Server, Setup, at_most, distribution, within
from _load import Group, errors, in_flight
from _probe import Probe, probing
from _report import ms, table

NUM_SHORTS = 64  # different ones, sent in turn
PERIOD_S = 0.05
NUM_CLIENTS = 16
LENGTHS = {"22k": 22_000, "100k": 100_000}
NUM_TEXTS = 4
SETTLE_S = 1.0
ALONE = "alone"
COLUMNS = ("p50", "p90", "p99", "max")


def run(setup: Setup) -> Record:
    """Every back end, the windows in turn."""
    found = {}
    for backend in setup.backends:
        with setup.server(tokenizer__backend=backend, tokenizer__workers=2, simulated__step_ms=1) as server:
            found[backend] = uvloop.run(_alternate(setup, server))
    return {"backends": found, "checks": _checks(found)}


async def _alternate(setup: Setup, server: Server) -> Record:
    plan = {
        "url": server.url,
        "health_period_s": 0,
        "streams": [],
        "short_period_s": PERIOD_S,
        "shorts": [server.stream_body(prompt, 1) for prompt in setup.prompts.cuts(SHORT_TOKENS, NUM_SHORTS)],
    }
    floods: dict[str, list[Group]] = {ALONE: []}
    for name, length in LENGTHS.items():
        prompts = setup.prompts.cuts(setup.size(length), NUM_TEXTS)
        floods[f"beside {name}"] = [(NUM_CLIENTS, [server.plain(prompt) for prompt in prompts])]
    ttft_s: dict[str, list[list[float]]] = defaultdict(list)
    failed: dict[str, Counter[str]] = defaultdict(Counter)
    async with probing(plan) as probe:
        for _ in range(setup.repeats):
            for name, groups in floods.items():
                seconds, errors_seen = await _window(setup, server, probe, groups)
                ttft_s[name].append(seconds)
                failed[name] += errors_seen
    return {
        name: {
            "ttft": distribution(second for run in runs for second in run),
            "runs": [distribution(run) for run in runs],
            "requests": sum(map(len, runs)),
            "errors": dict(failed[name]),
        }
        for name, runs in ttft_s.items()
    }


async def _window(setup: Setup, server: Server, probe: Probe, groups: list[Group]) -> tuple[list[float], Counter[str]]:
    async with in_flight(server.target, *groups) as answers:
        await asyncio.sleep(SETTLE_S if groups else 0.0)
        await probe.begin()
        await asyncio.sleep(setup.seconds)
        seen = await probe.end()
    await server.until_idle()
    return seen.ttft_s, errors(answers) + Counter(seen.errors)


def _checks(found: Record) -> list[Record]:
    checks = []
    for backend, rows in found.items():
        alone = rows[ALONE]["ttft"]
        for name, row in rows.items():
            if name == ALONE:
                continue
            # The p99 is asked of the fast back end alone: the reference takes 30 times the CPU for the same flood.
            for share in ("p50",) if backend == "hf" else ("p50", "p99"):
                limit_s = within(alone[share], 1.5, 0.010)
                checks.append(at_most(f"{backend}: {share} of the TTFT {name}", row["ttft"][share], limit_s))
    return checks


def tables(record: Record) -> str:
    """For people."""
    rows = [
        (
            f"{backend}: {name}",
            f"{row['requests']}",
            *(ms(row["ttft"].get(column)) for column in COLUMNS),
            f"{sum(row['errors'].values())}",
        )
        for backend, found in record["backends"].items()
        for name, row in found.items()
    ]
    title = f"Time to first token of {SHORT_TOKENS}-token prompts, ms\n"
    return "\n".join([title, table(("", "requests", *COLUMNS, "errors"), rows)])
