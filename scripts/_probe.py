"""How a server feels from outside, beside whatever load others put on it. A process of its own.

    python scripts/_probe.py

The first line of its input is a plan in JSON: {url, health_period_s, streams, short_period_s, shorts}; the last two
lists hold request bodies. The streams run all the time. While a window is open (lines "begin" and "end"), GET /health
and the short requests start on the clock, whether or not earlier ones were answered, on connections that are kept;
a period of 0 is never. After "end" one JSON line says what was seen: seconds, errors by kind. What was under way
when the window closed is waited for and counts.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import uvloop
from _client import Answer, Connection, Target, kind_of
from _load import errors, in_flight, started

_LINE_BYTES = 64 * 1024 * 1024
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One window, in seconds."""

    health_s: list[float]  # of each GET /health
    ttft_s: list[float]  # of each short request
    gaps_s: list[float]  # between the events of the streams
    late_s: list[float]  # how late the probe itself was
    errors: dict[str, int]


class Probe:
    """A running probe, as seen by the process that started it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def begin(self) -> None:
        """Open a window."""
        await self._write("begin")

    async def end(self) -> Seen:
        """Close it."""
        await self._write("end")
        return Seen(**json.loads(await self.read()))

    async def read(self) -> bytes:
        """A line. Raises RuntimeError where there is none."""
        assert self._process.stdout is not None
        async with asyncio.timeout(_TIMEOUT_S):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the probe ended")
        return line

    async def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        await self._process.stdin.drain()


@asynccontextmanager
async def probing(plan: dict[str, Any]) -> AsyncIterator[Probe]:
    """A probe; its streams have begun."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, stdin=pipe, stdout=pipe, limit=_LINE_BYTES)
    probe = Probe(process)
    try:
        await probe._write(json.dumps(plan))
        await probe.read()
        yield probe
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


# --- the process itself ---------------------------------------------------------------------------------------


class _Window:
    """What is under way between "begin" and "end"."""

    def __init__(self, target: Target, plan: dict[str, Any], free: list[Connection], streams: list[Answer]) -> None:
        self._target = target
        self._free = free  # connections
        self._streams = streams
        self._num_gaps = [len(stream.gaps_s) for stream in streams]
        self._late_s: list[float] = []
        self._health: list[Answer] = []
        self._shorts: list[Answer] = []
        self._asked: set[asyncio.Task[None]] = set()
        shorts = itertools.cycle([target.post("/v1/completions", body) for body in plan["shorts"]] or [b""])
        series = (
            (plan["health_period_s"], itertools.repeat(target.get("/health")), self._health),
            (plan["short_period_s"], shorts, self._shorts),
        )
        self._clocks = [asyncio.create_task(self._every(*one)) for one in series if one[0]]

    async def close(self) -> Seen:
        for clock in self._clocks:
            clock.cancel()
        now_s = time.perf_counter()
        gaps_s = [
            gap for stream, first in zip(self._streams, self._num_gaps, strict=True) for gap in stream.gaps_s[first:]
        ]
        gaps_s += [now_s - stream.last_s for stream in self._streams]  # the gap that is open now
        await asyncio.gather(*self._clocks, *self._asked, return_exceptions=True)
        return Seen(
            health_s=[answer.last_s - answer.sent_s for answer in self._health if not answer.error],
            ttft_s=[answer.first_s - answer.sent_s for answer in self._shorts if answer.first_s],
            gaps_s=gaps_s,
            late_s=self._late_s,
            errors=errors([*self._health, *self._shorts, *self._streams]),
        )

    async def _every(self, period_s: float, requests: Iterator[bytes], answers: list[Answer]) -> None:
        due_s = time.perf_counter()
        for request in requests:
            now_s = time.perf_counter()
            self._late_s.append(now_s - due_s)
            answers.append(Answer())
            task = asyncio.create_task(self._ask(request, answers[-1], now_s))
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)
            due_s += period_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))

    async def _ask(self, request: bytes, answer: Answer, now_s: float) -> None:
        try:
            connection = self._free.pop() if self._free else None
            if connection is None or connection.closed:
                connection = await self._target.connect()
            await connection.send(request, answer)
        except OSError as error:
            answer.error = kind_of(error)
            return
        answer.sent_s = now_s  # opening a connection counts
        self._free.append(connection)


async def _main() -> None:
    gc.disable()
    plan = json.loads(await _line())
    target = Target(plan["url"])
    streams = [target.post("/v1/completions", body) for body in plan["streams"]]
    free: list[Connection] = []
    async with in_flight(target, *((1, [stream]) for stream in streams)) as answers:
        await started(answers, len(streams))
        print("ready", flush=True)
        while await _line():
            window = _Window(target, plan, free, list(answers))
            await _line()
            print(json.dumps(asdict(await window.close())), flush=True)


async def _line() -> str:
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.strip()


if __name__ == "__main__":
    uvloop.run(_main())
