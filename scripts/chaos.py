"""Kill workers under load, and count what clients notice.

    python scripts/chaos.py [--seconds 60] [--seed 0] [--mean-pause 3] [--clients 16] [--torch] [--json]

Starts the whole system, asks for right answers while nothing happens, then asks the same questions again and again
while a seeded schedule sends SIGKILL to a random tokenizer, detokenizer or engine process. Every answer is compared
with the right one: plain and streamed, several choices, stop strings, long prompts. A table, then one JSON line. Exit
code 1 if anything was lost, wrong, or an error that a client saw, or if a process stays behind.

With ``--torch`` the default model answers in the deterministic mode; then only ready processes are victims, and an
engine dies at most once in three times its own start-up time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
from _client import Answer, Connection, Target, kind_of
from _report import json_line, table
from _server import ROOT, running_server
from tqdm import tqdm

ROLES = ("tokenizer", "detokenizer", "engine")
TITLE = re.compile(r"tokservice: (\w+) (\d+)")
REQUEST_TIMEOUT_S = 120.0
SETTLE_TIMEOUT_S = 60.0
SIMULATED = ("detokenizer.workers=2", "engine.processes=2", "simulated.step_ms=10")
TORCH = ("detokenizer.workers=2", "engine.deterministic=true", "engine.max_num_seqs=8")
WORDS = "time year people way day man thing woman life child world school state family student group".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Question:
    """A request whose answer is known."""

    path: str
    body: dict[str, Any]

    @property
    def streamed(self) -> bool:
        """Whether the answer comes as events."""
        return bool(self.body.get("stream"))


@dataclass(slots=True)
class Tally:
    """What became of the requests, and what was done to the system."""

    sent: int = 0
    right: int = 0
    wrong: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    lost: int = 0  # no end within the time limit
    kills: Counter[str] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)  # of what was wrong


def questions(rng: random.Random, *, torch: bool) -> list[Question]:
    """A mix of all kinds, streamed and plain."""
    asked = []
    for index in range(24 if torch else 60):
        words = " ".join(rng.choices(WORDS, k=rng.choice((5, 40) if torch else (5, 40, 400, 20_000))))
        body: dict[str, Any] = {
            "max_tokens": rng.choice((8, 24) if torch else (20, 60, 150)),
            "temperature": rng.choice((0.0, 0.8)),
            "seed": index,
            "n": 1 if index % 3 else 2,
            "stream": index % 2 == 0,
        }
        if index % 4 == 0:
            body["stop"] = [rng.choice("abcdefgh") + rng.choice("aeiou") for _ in range(3)]
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        if index % 5 == 0:
            asked.append(Question("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": words}]}))
        else:
            asked.append(Question("/v1/completions", {**body, "prompt": words}))
    return asked


def content(question: Question, answer: Answer) -> Any:
    """What an answer says, without what may differ between two right ones (ids, times, cached tokens)."""
    texts: Counter[int] = Counter()
    parts: dict[int, list[str]] = {}
    reasons: dict[int, str] = {}
    usage: dict[str, Any] = {}
    events: list[bytes] = [bytes(answer.body)]
    if question.streamed:
        lines = [line.removeprefix(b"data: ") for line in bytes(answer.body).split(b"\n\n") if line]
        if lines.count(b"[DONE]") != 1 or lines.pop() != b"[DONE]":
            return "not exactly one [DONE] at the end"
        events = lines
    for event in map(json.loads, events):
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            index = choice["index"]
            message = choice.get("delta") or choice.get("message") or choice
            parts.setdefault(index, []).append(message.get("text") or message.get("content") or "")
            if choice["finish_reason"]:
                texts[index] += 1
                reasons[index] = choice["finish_reason"]
        if "error" in event:
            return event["error"]["code"]
    joined = {index: "".join(pieces) for index, pieces in parts.items()}
    return joined, reasons, dict(texts), usage.get("prompt_tokens"), usage.get("completion_tokens")


async def ask(target: Target, connection: Connection | None, question: Question) -> tuple[Connection | None, Answer]:
    """One question, on a connection that is kept where it can be."""
    answer = Answer(keep=True)
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            if connection is None or connection.closed:
                connection = await target.connect()
            await connection.send(target.post(question.path, question.body), answer)
    except OSError as error:
        answer.error = kind_of(error)
    return connection, answer


async def right_answers(target: Target, asked: Sequence[Question]) -> list[Any]:
    """Ask while nothing happens. Raises RuntimeError where even that fails."""
    answers = []
    for question in tqdm(asked, desc="right answers", leave=False, file=sys.stderr):
        connection, answer = await ask(target, None, question)
        if connection is not None:
            connection.close()
        if answer.error or answer.status != 200:
            raise RuntimeError(f"no answer to {question.path}: {answer.error} {bytes(answer.body[:300])!r}")
        answers.append(content(question, answer))
    return answers


async def client(
    target: Target, asked: Sequence[Question], right: Sequence[Any], rng: random.Random, until_s: float, tally: Tally
) -> None:
    """Ask at random, one question after the other, until the time is over."""
    connection = None
    while time.monotonic() < until_s:
        index = rng.randrange(len(asked))
        tally.sent += 1
        start_s = time.monotonic()
        connection, answer = await ask(target, connection, asked[index])
        tally.latencies_s.append(time.monotonic() - start_s)
        if answer.error == "timeout":
            tally.lost += 1
            if connection is not None:
                connection.close()
        elif answer.error:
            tally.errors[answer.error] += 1
            tally.examples.append(f"{answer.error}: {bytes(answer.body[-300:])!r}")
        elif (got := content(asked[index], answer)) == right[index]:
            tally.right += 1
        else:
            tally.wrong += 1
            tally.examples.append(f"{asked[index].body | {'prompt': '...'}}:\n  got   {got}\n  right {right[index]}")
    if connection is not None:
        connection.close()


def system() -> Iterator[tuple[str, int, psutil.Process]]:
    """All living processes of ours, by role and slot."""
    for process in psutil.Process().children(recursive=True):
        try:
            match = TITLE.search(" ".join(process.cmdline()))
        except psutil.Error:
            continue
        if match:
            yield match[1], int(match[2]), process


async def killer(
    target: Target, rng: random.Random, arguments: argparse.Namespace, until_s: float, tally: Tally
) -> None:
    """SIGKILL by schedule."""
    engine_rests_until_s = 0.0
    while (pause_s := rng.expovariate(1 / arguments.mean_pause)) + time.monotonic() < until_s:
        await asyncio.sleep(pause_s)
        roles = [role for role in ROLES if role != "engine" or time.monotonic() >= engine_rests_until_s]
        role = rng.choice(roles)
        victims = [process for name, _, process in system() if name == role]
        if arguments.torch and await why_not_ready(target):
            continue
        if not victims:
            continue
        os.kill(rng.choice(victims).pid, signal.SIGKILL)
        tally.kills[role] += 1
        if arguments.torch and role == "engine":
            start_s = time.monotonic()
            while await why_not_ready(target) and time.monotonic() < until_s:
                await asyncio.sleep(0.2)
            engine_rests_until_s = time.monotonic() + 2 * (time.monotonic() - start_s)


async def why_not_ready(target: Target) -> str:
    """What the server says; '' if all processes are ready."""
    answer = Answer(keep=True)
    connection = await target.connect()
    await connection.send(target.get("/ready"), answer)
    connection.close()
    return "" if answer.status == 200 else bytes(answer.body).decode() or answer.error


async def settled(target: Target) -> list[str]:
    """What has not come to rest when all clients have ended."""
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    names = ("num_requests_unfinished", "num_requests_running", "num_requests_waiting", "unfinished_bytes")
    left = [""]
    while left and time.monotonic() < deadline_s:
        await asyncio.sleep(0.5)
        if reason := await why_not_ready(target):
            left = [reason]
            continue
        page = (await target.fetch("/metrics") or b"").decode()
        left = [
            f"{name} is {value}"
            for name in names
            for value in re.findall(rf"^tokservice_{name} (\S+)$", page, re.MULTILINE)
            if float(value)
        ]
    return left


def memory_mb() -> dict[str, float]:
    """Resident memory of the processes that live through it all."""
    return {role: process.memory_info().rss / 1e6 for role, _, process in system() if role in ("api", "router")}


async def chaos(url: str, arguments: argparse.Namespace) -> tuple[Tally, list[str], dict[str, float], dict[str, float]]:
    """One run against a running system."""
    target = Target(url)
    rng = random.Random(arguments.seed)
    asked = questions(rng, torch=arguments.torch)
    right = await right_answers(target, asked)
    tally = Tally()
    before = memory_mb()
    until_s = time.monotonic() + arguments.seconds
    clients = [
        client(target, asked, right, random.Random(f"{arguments.seed} {index}"), until_s, tally)
        for index in range(arguments.clients)
    ]
    with tqdm(total=arguments.seconds, desc="chaos", unit="s", leave=False, file=sys.stderr) as bar:
        work = asyncio.gather(killer(target, rng, arguments, until_s, tally), *clients)
        while not work.done():
            await asyncio.wait([work], timeout=1.0)
            bar.update(min(1.0, max(0.0, arguments.seconds - bar.n)))
            bar.set_postfix(sent=tally.sent, kills=tally.kills.total(), wrong=tally.wrong, errors=tally.errors.total())
        await work
    return tally, await settled(target), before, memory_mb()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of load (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mean-pause", type=float, default=3.0, help="seconds between kills (default: %(default)g)")
    parser.add_argument("--clients", type=int, default=0, help="default: 16, or 4 with --torch")
    parser.add_argument("--torch", action="store_true", help="the default model instead of the simulated engine")
    arguments = parser.parse_args(argv)
    arguments.clients = arguments.clients or (4 if arguments.torch else 16)
    config = ROOT / "configs" / ("default.toml" if arguments.torch else "simulated.toml")
    settings = [part for name in (TORCH if arguments.torch else SIMULATED) for part in ("--set", name)]
    with running_server("--config", str(config), *settings) as url:
        processes = [process for _, _, process in system()]
        tally, left, before, after = asyncio.run(chaos(url, arguments))
        processes += [process for _, _, process in system()]
    left += [f"process {process.pid} is still there" for process in psutil.wait_procs(processes, timeout=5)[1]]
    report(tally, left, before, after, arguments)
    return 1 if left or tally.wrong or tally.lost or tally.errors else 0


def report(
    tally: Tally, left: list[str], before: dict[str, float], after: dict[str, float], arguments: argparse.Namespace
) -> None:
    """Table and JSON line."""
    latencies = sorted(tally.latencies_s) or [0.0]
    kills = ", ".join(f"{role} {count}" for role, count in sorted(tally.kills.items()))
    rows = [
        ("requests", str(tally.sent)),
        ("right", str(tally.right)),
        ("wrong", str(tally.wrong)),
        ("errors", f"{tally.errors.total()} {dict(tally.errors) or ''}"),
        ("lost", str(tally.lost)),
        ("kills", f"{tally.kills.total()} ({kills})"),
        ("latency median, max (s)", f"{latencies[len(latencies) // 2]:.2f}, {latencies[-1]:.2f}"),
        *((f"memory of {role} (MB)", f"{before[role]:.0f} -> {after.get(role, 0):.0f}") for role in before),
        ("left behind", "; ".join(left) or "nothing"),
    ]
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
        "wrong": tally.wrong,
        "errors": dict(tally.errors),
        "lost": tally.lost,
        "kills": dict(tally.kills),
        "memory_mb": {role: [before[role], after.get(role, 0)] for role in before},
        "left_behind": left,
    }
    print(json_line(record))


if __name__ == "__main__":
    sys.exit(main())
