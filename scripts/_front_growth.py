"""Section "growth": how time, CPU and memory grow with the length of one prompt, and with the number of streams.

Memory is the peak of each process above what it held when the server had started; points go from small to large,
since a process does not return all of it.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter

import uvloop
from _front import ENDLESS, FRONT, SHORT_TOKENS, Record, Server, Setup, at_most
from _load import all_of, errors, in_flight, started
from _processes import Spent, StopWatch, Usage
from _report import ms, significant, table

LENGTHS = (100, 1_000, 10_000, 100_000, 1_000_000)
STREAMS = (1, 10, 100, 500, 1000, 2000)
STREAM_STEP_MS = 100  # so that 2,000 streams are no overload
CPU_GROWTH, MEMORY_GROWTH = 1.5, 2.0  # what passes for linear; memory comes in steps


def run(setup: Setup) -> Record:
    """Both curves, each on a fresh server."""
    lengths, streams = (LENGTHS[:-1], STREAMS[:-1]) if setup.quick else (LENGTHS, STREAMS)
    with setup.server(simulated__step_ms=1) as server:
        by_length = uvloop.run(_by_length(setup, server, [setup.size(length) for length in lengths]))
    with setup.server(simulated__step_ms=STREAM_STEP_MS) as server:
        by_streams = uvloop.run(_by_streams(setup, server, [setup.size(number) for number in streams]))
    curves = {"length": by_length, "streams": by_streams}
    checks = [
        at_most(
            f"{what} per {name}, largest size over the one before",
            _unit_cost_growth(curves[key], column),
            limit,
            "times",
        )
        for key, name in (("length", "token"), ("streams", "stream"))
        for what, column, limit in (("CPU", "front_cpu_s", CPU_GROWTH), ("memory", "front_bytes", MEMORY_GROWTH))
    ]
    return {"curves": curves, "checks": checks}


async def _by_length(setup: Setup, server: Server, lengths: list[int]) -> list[Record]:
    """One prompt at a time; times are medians of the repeats, memory is the peak over them."""
    first = server.processes.usage()
    await all_of(server.target, [server.plain(setup.prompts.cut(min(lengths)))], 1)
    rows = []
    for length in lengths:
        request = server.plain(setup.prompts.cut(length))
        server.processes.reset_peaks()
        runs: list[Spent] = []
        failed: Counter[str] = Counter()
        for _ in range(setup.repeats):
            watch = StopWatch(server.processes)
            failed += errors(await all_of(server.target, [request], 1))
            runs.append(watch.read())
        cpu_s = {role: statistics.median(run.cpu_s[role] for run in runs) for role in runs[0].cpu_s}
        rows.append(_row(length, statistics.median(run.wall_s for run in runs), cpu_s, first, server, failed))
    return rows


async def _by_streams(setup: Setup, server: Server, numbers: list[int]) -> list[Record]:
    """All begin at once and go on; the time until all have begun, the CPU time that they take in a second.

    Between two steps an engine takes up a bounded number of new requests: with many, that is the time to begin.
    """
    first = server.processes.usage()
    request = server.stream(setup.prompts.cut(SHORT_TOKENS), ENDLESS)
    rows = []
    for number in numbers:
        server.processes.reset_peaks()
        start_s = time.perf_counter()
        async with in_flight(server.target, (number, [request])) as answers:
            await started(answers, number)
            start_s = time.perf_counter() - start_s
            watch = StopWatch(server.processes)
            await asyncio.sleep(setup.seconds)
            cpu_share = watch.read().cpu_share
            failed = errors(answers)
        rows.append(_row(number, start_s, cpu_share, first, server, failed))
        await server.until_idle()
    return rows


def _row(
    size: int, wall_s: float, cpu_s: dict[str, float], first: dict[str, Usage], server: Server, failed: Counter[str]
) -> Record:
    peaks = server.processes.usage()
    more = {role: max(0, usage.peak_bytes - first[role].resident_bytes) for role, usage in peaks.items()}
    return {
        "size": size,
        "wall_s": wall_s,
        "front_cpu_s": sum(cpu_s[role] for role in FRONT),
        "cpu_s": cpu_s,
        "front_bytes": sum(more[role] for role in FRONT),
        "bytes": more,
        "errors": dict(failed),
    }


def _unit_cost_growth(rows: list[Record], what: str) -> float:
    """How many times a token (or stream) costs more at the largest size than at the one before: 1 is linear."""
    before, after = rows[-2:]
    return float(after[what] / after["size"] / max(1e-9, before[what] / before["size"]))


def tables(record: Record) -> str:
    """For people."""
    lines = []
    for name, header in (
        ("length", ("prompt tokens", "whole ms", "CPU ms")),
        ("streams", ("streams", "all begun ms", "CPU ms a second")),
    ):
        roles = ("tokenizer", "api", "router", "detokenizer")
        rows = [
            (
                f"{row['size']:,}",
                ms(row["wall_s"]),
                *(ms(value) for value in (row["front_cpu_s"], *(row["cpu_s"][role] for role in roles))),
                *(significant(value / 1e6) for value in (row["front_bytes"], *(row["bytes"][role] for role in roles))),
                f"{sum(row['errors'].values())}",
            )
            for row in record["curves"][name]
        ]
        lines += [table((*header, *roles, "MB more", *roles, "errors"), rows), ""]
    return "\n".join(["Growth: time, CPU and peak memory (all front-end processes, then each)\n", *lines[:-1]])
