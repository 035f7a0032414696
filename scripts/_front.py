"""What the sections of ``bench_front_end.py`` share: the settings of a run, a server, distributions, checks.

A section is a module with ``run(setup) -> Record`` and ``tables(record) -> str``. Records hold plain JSON values;
times are seconds.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _client import Target
from _processes import Processes
from _prompts import Prompts
from _report import quantiles, share_name
from _scrape import Histogram, Page, fresh_page
from _server import running_server
from tokenizers import Tokenizer

Record = dict[str, Any]

MODEL = "m"
SHORT_TOKENS = 100
ENDLESS = 1_000_000  # tokens: more than a stream gets to see
FRONT = ("api", "router", "tokenizer", "detokenizer")  # the front end's processes; the engine is a stub
SHARES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999)
IDLE_SHARE = 0.05  # of a core: an idle tokenizer uses less
_IDLE_POLL_S = 0.2
_IDLE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of one run."""

    folder: Path  # of the tokenizer
    tokenizer: Tokenizer
    prompts: Prompts
    backends: tuple[str, ...]  # values of tokenizer.backend
    repeats: int
    seconds: float  # of each window
    quick: bool  # fewer points
    shrink: int  # divides lengths of long prompts and numbers of streams

    def size(self, number: int) -> int:
        """A number of tokens or streams, shrunk."""
        return max(1, number // self.shrink)

    @contextmanager
    def server(self, **settings: object) -> Iterator[Server]:
        """A server for this run; ``tokenizer__workers=1`` sets tokenizer.workers."""
        flags = [flag for key, value in settings.items() for flag in ("--set", f"{key.replace('__', '.')}={value}")]
        with running_server("--model", str(self.folder), "--served-model-name", MODEL, *flags) as url:
            yield Server(url, Target(url), Processes(), self._plain_ids())

    def _plain_ids(self) -> list[int]:
        ids: list[int] = self.tokenizer.encode(" the", add_special_tokens=False).ids
        return ids


@dataclass(frozen=True, slots=True)
class Server:
    """A running server with the simulated engine."""

    url: str
    target: Target
    processes: Processes
    plain_ids: list[int]  # the engine is told to make these: each is a piece of text, so each token is an event

    def stream_body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """A streamed completion."""
        bias = {str(token_id): 100 for token_id in self.plain_ids}
        return {**self._body(prompt, max_tokens), "stream": True, "logit_bias": bias}

    def stream(self, prompt: str, max_tokens: int) -> bytes:
        """The same, as a request."""
        return self.target.post("/v1/completions", self.stream_body(prompt, max_tokens))

    def plain(self, prompt: str, max_tokens: int = 1) -> bytes:
        """A completion that is answered in one piece."""
        return self.target.post("/v1/completions", self._body(prompt, max_tokens))

    def _body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}

    async def page(self) -> Page:
        """/metrics, with all that happened until now."""
        page = await fresh_page(self.target)
        if page is None:
            raise RuntimeError("/metrics says nothing of the loop's lag")
        return page

    async def until_idle(self) -> None:
        """Until the tokenizers are at rest: what was being encoded when its client hung up is encoded to its end."""
        deadline_s = time.monotonic() + _IDLE_TIMEOUT_S
        start_s, before_s = time.monotonic(), self._tokenizer_cpu_s()
        while time.monotonic() < deadline_s:
            await asyncio.sleep(_IDLE_POLL_S)
            now_s, after_s = time.monotonic(), self._tokenizer_cpu_s()
            if after_s - before_s < IDLE_SHARE * (now_s - start_s):
                return
            start_s, before_s = now_s, after_s
        raise RuntimeError("the tokenizers do not come to rest")

    def _tokenizer_cpu_s(self) -> float:
        return self.processes.usage()["tokenizer"].cpu_s


def distribution(values: Iterable[float]) -> dict[str, float]:
    """{'p50': ..., 'max': ...} of some seconds, fine enough for a curve."""
    return quantiles(values, SHARES)


def of_histogram(histogram: Histogram) -> dict[str, float]:
    """The same; the maximum is the upper bound of the highest bucket in use."""
    return {share_name(share): histogram.quantile(share) for share in SHARES} | {"max": histogram.highest}


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of several distributions, share by share."""
    return {name: statistics.median(run[name] for run in runs if name in run) for run in runs[:1] for name in run}


def within(base_s: float, times: float, more_s: float) -> float:
    """A limit: so many times the base, or so much more, whichever is larger."""
    return max(times * base_s, base_s + more_s)


def at_most(what: str, value: float, limit: float, unit: str = "ms") -> Record:
    """A check. ``ms`` and ``µs`` are given in seconds."""
    return _check(what, value, limit, unit, "<=", value <= limit)


def at_least(what: str, value: float, limit: float, unit: str = "times") -> Record:
    """A check."""
    return _check(what, value, limit, unit, ">=", value >= limit)


def _check(what: str, value: float, limit: float, unit: str, relation: str, holds: bool) -> Record:
    scale = {"ms": 1e3, "µs": 1e6}.get(unit, 1.0)
    return {
        "what": what,
        "value": value * scale,
        "relation": relation,
        "limit": limit * scale,
        "unit": unit,
        "holds": holds,
    }
