"""Load a running server with concurrent streaming clients and say how it kept up.

    python scripts/load_test.py --concurrency 32 --requests 200 --prompt-tokens 100 --max-tokens 64

Closed loop: every client sends its next request when the last one has ended. Prints a table and, as the last line,
the same figures as JSON. Works with any server of the OpenAI API; from one of this project it also reads, from
/metrics before and after, how late the event loop of the HTTP process ran and what each process cost.

Bounded by --requests and --duration, whichever ends first. Exit code 1 if no request succeeded.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import uvloop
from _client import Answer, Target, closed_loop
from _corpus import text
from _report import NONE, json_line, ms, quantiles, share_name, significant, table
from _scrape import Page, fresh_page
from tqdm import tqdm

CHARS_PER_TOKEN = 4.5  # of the text, in common vocabularies; what the server counted is reported
NUM_PROMPTS = 64  # different ones, sent in turn
LAG_SHARES = (0.5, 0.99, 0.999)


def main() -> int:
    """Run the command; returns the exit code."""
    arguments = _parse()
    try:
        target = Target(arguments.url, arguments.api_key)
        record = uvloop.run(_run(target, arguments))
    except (OSError, ValueError) as error:
        print(f"load_test: {arguments.url}: {error or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(_table(record))
    print(json_line(record))
    return 0 if record["requests_ok"] else 1


async def _run(target: Target, arguments: argparse.Namespace) -> dict[str, Any]:
    model = arguments.model or await _first_model(target)
    bodies = _bodies(target, model, arguments)
    before = await fresh_page(target)
    answers: list[Answer] = []
    cpu_s, start_s = time.process_time(), time.perf_counter()
    deadline_s = start_s + arguments.duration
    requests = itertools.takewhile(
        lambda _: time.perf_counter() < deadline_s,
        itertools.islice(itertools.cycle(bodies), arguments.requests or None),
    )
    # Without a terminal there is no bar.
    with tqdm(total=arguments.requests or None, unit=" requests", file=sys.stderr, disable=None) as bar:
        await _load(target, requests, answers, arguments, bar)
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    after = await fresh_page(target) if before is not None else None
    settings = ("concurrency", "prompt_tokens", "max_tokens", "api")
    return {
        **{name: getattr(arguments, name) for name in settings},
        **_client_side(answers, wall_s),
        "client_cpu_share": cpu_s / wall_s,  # near 1: this script is the bottleneck
        **_server_side(before, after, sum(answer.num_tokens[1] for answer in answers)),
    }


async def _load(
    target: Target, requests: Iterator[bytes], answers: list[Answer], arguments: argparse.Namespace, bar: tqdm[Any]
) -> None:
    """Run all clients to their end, or until the time is over; then what is unfinished is cut short."""
    clients = [
        asyncio.create_task(
            closed_loop(target, requests, answers, timeout_s=arguments.timeout, on_end=lambda _: bar.update())
        )
        for _ in range(arguments.concurrency)
    ]
    _, late = await asyncio.wait(clients, timeout=arguments.duration)
    for client in late:
        client.cancel()
    for outcome in await asyncio.gather(*clients, return_exceptions=True):
        if isinstance(outcome, Exception):  # a fault of this script
            raise outcome


async def _first_model(target: Target) -> str:
    page = await target.fetch("/v1/models")
    if page is None:
        raise ValueError("no /v1/models there: name the model with --model")
    return str(json.loads(page)["data"][0]["id"])


def _bodies(target: Target, model: str, arguments: argparse.Namespace) -> list[bytes]:
    length = math.ceil(arguments.prompt_tokens * CHARS_PER_TOKEN)
    source = text(length + NUM_PROMPTS * 97, seed=1)
    common = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": arguments.max_tokens,
        "temperature": 0.0,
    }
    if not arguments.stop_early:
        common["ignore_eos"] = True
    bodies = []
    for start in range(0, NUM_PROMPTS * 97, 97):
        prompt = source[start : start + length]
        if arguments.api == "chat":
            body = {**common, "messages": [{"role": "user", "content": prompt}]}
            bodies.append(target.post("/v1/chat/completions", body))
        else:
            bodies.append(target.post("/v1/completions", {**common, "prompt": prompt}))
    return bodies


# --- figures --------------------------------------------------------------------------------------------------


def _client_side(answers: list[Answer], wall_s: float) -> dict[str, Any]:
    """What the clients saw. Seconds; a stream that was cut short at the end counts with what it had."""
    ok = [answer for answer in answers if answer.whole and not answer.error]
    streamed = [answer for answer in answers if answer.first_s and not answer.error]
    tokens = [answer.num_tokens for answer in streamed]
    num_output = sum(output for _, output in tokens)
    prompts = [prompt for prompt, _ in tokens if prompt]
    return {
        "wall_s": wall_s,
        "requests_ok": len(ok),
        "requests_cut_short": sum(not answer.whole and not answer.error for answer in answers),
        "errors": dict(Counter(answer.error for answer in answers if answer.error)),
        "prompt_tokens_mean": sum(prompts) / len(prompts) if prompts else None,
        "requests_per_s": len(ok) / wall_s,
        "output_tokens": num_output,
        "output_tokens_per_s": num_output / wall_s,
        "ttft_s": quantiles(answer.first_s - answer.sent_s for answer in streamed),
        "itl_s": quantiles(itertools.chain.from_iterable(answer.gaps_s for answer in streamed)),
        "e2e_s": quantiles(answer.last_s - answer.sent_s for answer in ok),
    }


def _server_side(before: Page | None, after: Page | None, num_tokens: int) -> dict[str, Any]:
    """What the server counted meanwhile: the loop's lag, and CPU time by process."""
    if before is None or after is None:
        return {}
    record: dict[str, Any] = {}
    lag_before, lag_after = before.lag(), after.lag()
    if lag_before and lag_after:
        lag = lag_after - lag_before
        record["loop_lag_s"] = {share_name(share): lag.quantile(share) for share in LAG_SHARES} | {"max": lag.highest}
        record["loop_lag_beats"] = lag.total
    name = "process_cpu_seconds_total"
    used = {
        process: value - before.by_process(name).get(process, 0.0) for process, value in after.by_process(name).items()
    }
    record["cpu_s"] = used
    record["cpu_us_per_token"] = {process: value / num_tokens * 1e6 for process, value in used.items() if num_tokens}
    return record


def _table(record: dict[str, Any]) -> str:
    shares = ("p50", "p90", "p99", "p99.9", "max")
    times = {"TTFT": "ttft_s", "inter-token": "itl_s", "whole request": "e2e_s", "loop lag (server)": "loop_lag_s"}
    rows = [(title, *(ms(record[key].get(share)) for share in shares)) for title, key in times.items() if key in record]
    errors = ", ".join(f"{count} {kind}" for kind, count in sorted(record["errors"].items())) or "none"
    prompt = NONE if record["prompt_tokens_mean"] is None else f"{record['prompt_tokens_mean']:.0f}"
    lines = [
        f"{record['requests_ok']} requests in {record['wall_s']:.1f} s by {record['concurrency']} clients"
        f" ({record['requests_cut_short']} cut short at the end)   errors: {errors}",
        f"{significant(record['requests_per_s'])} requests/s   "
        f"{significant(record['output_tokens_per_s'])} output tokens/s   "
        f"prompts of {prompt} tokens   this client used "
        f"{record['client_cpu_share']:.0%} of a core\n",
        table(("ms", *shares), rows),
    ]
    if cost := record.get("cpu_us_per_token"):
        cpu = [(process, f"{record['cpu_s'][process]:.2f}", significant(cost[process])) for process in sorted(cost)]
        lines += ["", table(("process", "CPU s", "CPU µs per output token"), cpu)]
    return "\n".join(lines) + "\n"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Load a running server with concurrent streaming clients.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--model", default="", help="default: the first that the server names")
    parser.add_argument("--api", choices=("completions", "chat"), default="completions", help="default: %(default)s")
    parser.add_argument("--concurrency", type=_positive(int), default=8, help="clients; default: %(default)s")
    parser.add_argument("--requests", type=_positive(int), help="in all; default: 100, or no limit with --duration")
    parser.add_argument("--duration", type=_positive(float), help="seconds; default: 300")
    parser.add_argument("--prompt-tokens", type=_positive(int), default=100, help="about; default: %(default)s")
    parser.add_argument("--max-tokens", type=_positive(int), default=64, help="default: %(default)s")
    parser.add_argument("--stop-early", action="store_true", help="let answers end before --max-tokens")
    parser.add_argument("--timeout", type=_positive(float), default=120.0, help="of a request; default: %(default)s s")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help="default: $OPENAI_API_KEY")
    arguments = parser.parse_args()
    if arguments.requests is None and arguments.duration is None:
        arguments.requests = 100
    arguments.duration = arguments.duration or 300.0
    return arguments


def _positive(kind: type[int] | type[float]) -> Any:
    def number(value: str) -> int | float:
        parsed = kind(value)
        if not 0 < parsed < math.inf:
            raise argparse.ArgumentTypeError("must be above 0")
        return parsed

    return number


if __name__ == "__main__":
    sys.exit(main())
