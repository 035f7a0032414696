"""Section "lag": the event loop, and the server from outside, while 16 prompts of 22k tokens and one of 500k are
kept in flight beside 100 streams of 50 tokens/s; in turn with the same streams and no prompts.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

import uvloop
from _encode_in_process import HEARTBEAT_S, STEP_S, encode_in_process
from _front import (
    ENDLESS,
    SHORT_TOKENS,
    Record,
    Server,
    Setup,
    at_least,
    at_most,
    distribution,
    medians,
    of_histogram,
    within,
)
from _load import Group, errors, in_flight, started
from _probe import Probe, probing
from _processes import StopWatch
from _report import ms, significant, spread, table

NUM_STREAMS = 100
NUM_PROBE_STREAMS = 4  # of these, watched from outside
NUM_LONG, LONG_TOKENS = 16, 22_000
HUGE_TOKENS = 500_000
HEALTH_PERIOD_S = 0.005
SETTLE_S = 0.5
QUIET, FLOOD = "streams alone", "streams and prompts"
IN_PROCESS = {
    "loop": "encode on the loop",
    "executor_encode": "encode in an executor",
    "executor_batch": "encode_batch_fast in an executor",
}
ROLES = ("api", "router", "detokenizer", "engine", "tokenizer")
COLUMNS = ("p50", "p99", "p99.9", "max")


def run(setup: Setup) -> Record:
    """Every back end whole, then the same prompts encoded in the HTTP process, in three ways."""
    long, huge = setup.prompts.cuts(setup.size(LONG_TOKENS), NUM_LONG), setup.prompts.cut(setup.size(HUGE_TOKENS))
    settings = {"api__lag_heartbeat_ms": HEARTBEAT_S * 1000, "simulated__step_ms": STEP_S * 1000}
    whole = {}
    for backend in setup.backends:
        with setup.server(tokenizer__backend=backend, **settings) as server:
            whole[backend] = uvloop.run(_alternate(setup, server, long, huge))
    mix = {FLOOD: [(NUM_LONG, long), (1, [huge])]}
    in_process = {}
    for how in IN_PROCESS:
        lag, num_prompts = encode_in_process(how, setup.folder, mix, setup.seconds, NUM_STREAMS)[FLOOD]
        in_process[how] = {"lag": of_histogram(lag), "beats": lag.total, "prompts": num_prompts}
    record = {"num_streams": setup.size(NUM_STREAMS), "whole": whole, "in_process": in_process}
    return {**record, "checks": _checks(record)}


async def _alternate(setup: Setup, server: Server, long: list[str], huge: str) -> dict[str, list[Record]]:
    body = server.stream_body(setup.prompts.cut(SHORT_TOKENS), ENDLESS)
    num_others = max(1, setup.size(NUM_STREAMS) - NUM_PROBE_STREAMS)
    flood: list[Group] = [(NUM_LONG, [server.plain(prompt) for prompt in long]), (1, [server.plain(huge)])]
    plan = {
        "url": server.url,
        "health_period_s": HEALTH_PERIOD_S,
        "streams": [body] * NUM_PROBE_STREAMS,
        "short_period_s": 0,
        "shorts": [],
    }
    runs: dict[str, list[Record]] = defaultdict(list)
    async with in_flight(server.target, (num_others, [server.stream(body["prompt"], ENDLESS)])) as streams:
        await started(streams, num_others)
        async with probing(plan) as probe:
            for _ in range(setup.repeats):
                for name, groups in ((QUIET, []), (FLOOD, flood)):
                    runs[name].append(await _window(setup, server, probe, groups))
                    await server.until_idle()
        if len(streams) > num_others or errors(streams):
            raise RuntimeError(f"the streams did not go on: {dict(errors(streams))}")
    return runs


async def _window(setup: Setup, server: Server, probe: Probe, groups: Sequence[Group]) -> Record:
    """The prompts are in flight before the window opens and until it has closed."""
    async with in_flight(server.target, *groups) as answers:
        await asyncio.sleep(SETTLE_S)
        await probe.begin()
        before_page, watch, client_s = await server.page(), StopWatch(server.processes), time.process_time()
        num_before = sum(answer.whole for answer in answers)
        await asyncio.sleep(setup.seconds)
        after_page, spent, client_s = await server.page(), watch.read(), time.process_time() - client_s
        num_prompts = sum(answer.whole for answer in answers) - num_before
        seen = await probe.end()
        failed = errors(answers) + Counter(seen.errors)
    before_lag, after_lag = before_page.lag(), after_page.lag()
    assert before_lag is not None
    assert after_lag is not None
    return {
        "lag": of_histogram(after_lag - before_lag),
        "beats": (after_lag - before_lag).total,
        "health": distribution(seen.health_s),
        "gap": distribution(seen.gaps_s),
        "probe_late": distribution(seen.late_s),
        "prompts_per_s": num_prompts / spent.wall_s,
        "cpu_share": spent.cpu_share,
        "client_cpu_share": client_s / spent.wall_s,  # of the load, which competes for the same cores
        "delay_share": spent.delay_share,
        "errors": dict(failed),
    }


def _checks(record: Record) -> list[Record]:
    checks = []
    for backend, runs in record["whole"].items():
        quiet, flood = (
            {key: medians([window[key] for window in runs[name]]) for key in ("lag", "health", "gap")}
            for name in (QUIET, FLOOD)
        )
        for share in ("p99", "p99.9"):
            limit_s = within(quiet["lag"][share], 1.5, 0.001)
            checks.append(at_most(f"{backend}: {share} of the lag", flood["lag"][share], limit_s))
        longest_s, gap_s = flood["lag"]["max"], max(window["gap"]["max"] for window in runs[FLOOD])
        lags = {how: found["lag"]["max"] for how, found in record["in_process"].items()}
        executors_s = min(lags["executor_encode"], lags["executor_batch"])
        checks += [
            at_least(f"{backend}: max lag below encode on the loop", lags["loop"] / longest_s, 100),
            at_most(f"{backend}: max lag, against both executors", longest_s, executors_s),
            at_most(f"{backend}: p99 of /health", flood["health"]["p99"], within(quiet["health"]["p99"], 2, 0.010)),
            at_most(f"{backend}: longest gap of a stream in all runs", gap_s, 0.060),
        ]
    return checks


def tables(record: Record) -> str:
    """For people."""
    inside, outside, shares = [], [], []
    for backend, runs in record["whole"].items():
        for name, windows in runs.items():
            title = f"{backend}: {name}"
            beats = sum(window["beats"] for window in windows)
            inside.append((title, f"{beats}", *(_cell(windows, "lag", column) for column in COLUMNS)))
            cells = [_cell(windows, "health", "p50"), _cell(windows, "health", "p99"), _cell(windows, "gap", "max")]
            rate = statistics.mean(window["prompts_per_s"] for window in windows)
            failed = sum(sum(window["errors"].values()) for window in windows)
            outside.append((title, *cells, significant(rate), f"{failed}"))
            client = statistics.mean(window["client_cpu_share"] for window in windows)
            shares.append((title, *(_share(windows, role) for role in ROLES), f"{client:.0%}"))
    for how, found in record["in_process"].items():
        inside.append((IN_PROCESS[how], f"{found['beats']}", *(ms(found["lag"][column]) for column in COLUMNS)))
    return "\n".join(
        [
            f"Lag of a {HEARTBEAT_S * 1000:g} ms heartbeat in the API process, ms: median (lowest to highest);"
            f" {record['num_streams']} streams\n",
            table(("", "beats", *COLUMNS), inside),
            "\nFrom outside, ms\n",
            table(("", "/health p50", "p99", "longest stream gap", "prompts/s", "errors"), outside),
            "\nShare of the time that a process computed, and that its main thread waited for a CPU\n",
            table(("", *ROLES, "load"), shares),
        ]
    )


def _cell(windows: list[Record], key: str, column: str) -> str:
    return spread([window[key][column] for window in windows])


def _share(windows: list[Record], role: str) -> str:
    computed, waited = (
        statistics.mean(window[key][role] for window in windows) for key in ("cpu_share", "delay_share")
    )
    return f"{computed:.0%}, {waited:.0%}"
