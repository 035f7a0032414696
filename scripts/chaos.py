"""Kill and stop processes under load, flood the system, and count what clients notice.

    python scripts/chaos.py [--seconds 60] [--seed 0] [--kill 3] [--stop 20] [--flood 30] [--clients 16] [--torch]

Starts the whole system, asks for right answers while nothing happens, then asks the same questions again and again
while seeded schedules do damage, each after so many seconds on average (0: never):

* kill: SIGKILL to a random tokenizer, detokenizer or engine process;
* stop: SIGSTOP to a random process, and SIGCONT after up to two seconds; some workers stay stopped, until the
  supervisor, which hears nothing of them, replaces them;
* flood: several times as many requests at once as are admitted: each is answered right or refused with 429.

Every answer is compared with the right one: plain and streamed, several choices, stop strings, long prompts. A table,
then one JSON line. Exit code 1 if anything was lost, wrong, or an error that a client saw; if memory grew; if a
process, an open file, a socket or the run directory stays behind.

With ``--torch`` the default model answers in the deterministic mode; then only ready processes are victims, and an
engine dies at most once in three times its own start-up time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from _chaos_damage import careful_killer, flooder, killer, stopper, system
from _chaos_leaks import Held, growth, held, leaks, survivors
from _chaos_load import Tally, client, questions, right_answers
from _client import Target
from _report import json_line, table
from _server import ROOT, running_server
from tqdm import tqdm

MAX_UNFINISHED = 64
FLOOD_REQUESTS = 4 * MAX_UNFINISHED
COMMON = ("detokenizer.workers=2", f"router.max_unfinished_requests={MAX_UNFINISHED}")
SIMULATED = ("engine.processes=2", "simulated.step_ms=10", "runtime.hang_timeout_s=8")
TORCH = ("engine.deterministic=true", "engine.max_num_seqs=8", "runtime.hang_timeout_s=20")


async def chaos(url: str, run_dir: Path, arguments: argparse.Namespace) -> tuple[Tally, list[str], list[Held]]:
    """One run against a running system: what came of it, what is left behind, what was held when."""
    target = Target(url)
    asked = questions(random.Random(arguments.seed), torch=arguments.torch)
    right = await right_answers(target, asked)
    tally = Tally()
    moments = [held(run_dir)]
    start_s = time.monotonic()
    until_s = start_s + arguments.seconds

    def chance(what: str) -> random.Random:
        return random.Random(f"{arguments.seed} {what}")

    kill = careful_killer if arguments.torch else killer
    with tqdm(total=arguments.seconds, desc="chaos", unit="s", leave=False, file=sys.stderr) as bar:
        work = asyncio.gather(
            kill(target, chance("kill"), arguments.kill, until_s, tally),
            stopper(target, chance("stop"), arguments.stop, until_s, tally),
            flooder(target, chance("flood"), arguments.flood, until_s, tally, asked, right, FLOOD_REQUESTS),
            *(client(target, asked, right, chance(f"{i}"), until_s, tally) for i in range(arguments.clients)),
        )
        while not work.done():
            await asyncio.wait([work], timeout=1.0)
            if len(moments) == 1 and time.monotonic() - start_s > arguments.seconds / 2:
                moments.append(held(run_dir))
            bar.update(min(1.0, max(0.0, arguments.seconds - bar.n)))
            bar.set_postfix(sent=tally.sent, kills=tally.kills.total(), wrong=tally.wrong, errors=tally.errors.total())
        await work
    left = await leaks(target, run_dir, moments[0])
    moments.append(held(run_dir))
    return tally, left + growth(moments[-2], moments[-1]), moments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of load (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=0)
    pauses = (("kill", 3.0, "kills"), ("stop", 20.0, "stops"), ("flood", 30.0, "floods"))
    for name, seconds, what in pauses:
        described = f"seconds between {what}, on average; 0: none (default: %(default)g)"
        parser.add_argument(f"--{name}", type=float, default=seconds, help=described)
    parser.add_argument("--clients", type=int, default=0, help="default: 16, or 4 with --torch")
    parser.add_argument("--torch", action="store_true", help="the default model instead of the simulated engine")
    arguments = parser.parse_args(argv)
    arguments.clients = arguments.clients or (4 if arguments.torch else 16)
    config = ROOT / "configs" / ("default.toml" if arguments.torch else "simulated.toml")
    with tempfile.TemporaryDirectory(prefix="chaos", dir="/tmp") as folder:
        run_dir = Path(folder) / "run"
        settings = (*COMMON, *(TORCH if arguments.torch else SIMULATED), f"runtime.run_dir={run_dir}")
        flags = [part for name in settings for part in ("--set", name)]
        with running_server("--config", str(config), *flags) as url:
            processes = [process for _, _, process in system()]
            tally, left, moments = asyncio.run(chaos(url, run_dir, arguments))
            processes += [process for _, _, process in system()]
        left += survivors(processes, run_dir)
    if tally.unaccounted:
        left.append(f"{tally.unaccounted} requests are not accounted for")
    report(tally, left, moments, arguments)
    return 1 if left or tally.wrong or tally.lost or tally.errors else 0


def report(tally: Tally, left: list[str], moments: list[Held], arguments: argparse.Namespace) -> None:
    """Table and JSON line."""
    latencies = sorted(tally.latencies_s) or [0.0]
    damage = {"kills": tally.kills, "stops": tally.stops, "stops for good": tally.hangs}
    rows = [
        ("requests", str(tally.sent)),
        ("right", str(tally.right)),
        ("refused in a flood", str(tally.refused)),
        ("wrong", str(tally.wrong)),
        ("errors", f"{tally.errors.total()} {dict(tally.errors) or ''}"),
        ("lost", str(tally.lost)),
        *(
            (name, f"{counts.total()} ({', '.join(f'{role} {n}' for role, n in sorted(counts.items()))})")
            for name, counts in damage.items()
        ),
        ("floods", f"{tally.num_floods} of {FLOOD_REQUESTS} requests"),
        ("latency median, max (s)", f"{latencies[len(latencies) // 2]:.2f}, {latencies[-1]:.2f}"),
    ]
    for name in moments[0].memory_mb:
        memory = " -> ".join(f"{moment.memory_mb[name]:.0f}" for moment in moments)
        files = " -> ".join(str(moment.files[name]) for moment in moments)
        rows.append((f"{name}: memory (MB), open files", f"{memory}, {files}"))
    rows.append(("socket files", " -> ".join(str(moment.socket_files) for moment in moments)))
    rows.append(("left behind", "; ".join(left) or "nothing"))
    print(table(("chaos", f"{arguments.seconds:g} s, seed {arguments.seed}"), rows))
    for example in tally.examples[:5]:
        print(example)
    record = {
        "benchmark": "chaos",
        "engine": "torch" if arguments.torch else "simulated",
        "seconds": arguments.seconds,
        "seed": arguments.seed,
        "requests": tally.sent,
        "right": tally.right,
        "refused": tally.refused,
        "wrong": tally.wrong,
        "errors": dict(tally.errors),
        "lost": tally.lost,
        "kills": dict(tally.kills),
        "stops": dict(tally.stops),
        "hangs": dict(tally.hangs),
        "floods": tally.num_floods,
        "latency_s": [latencies[len(latencies) // 2], latencies[-1]],
        "memory_mb": {name: [moment.memory_mb[name] for moment in moments] for name in moments[0].memory_mb},
        "left_behind": left,
    }
    print(json_line(record))


if __name__ == "__main__":
    sys.exit(main())
