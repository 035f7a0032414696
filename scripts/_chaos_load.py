"""What ``chaos.py`` asks while things break, and what became of it."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from _client import Answer, Connection, Target, kind_of
from tqdm import tqdm

REQUEST_TIMEOUT_S = 120.0
REFUSED = "HTTP 429"
RIGHT_ANSWERS_AT_ONCE = 16
FLOODED_PAUSE_S = 0.1
SHORT_BYTES = 1000  # of the questions of a flood
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
    refused: int = 0  # with 429, while a flood was on
    errors: Counter[str] = field(default_factory=Counter)
    lost: int = 0  # no end within the time limit
    kills: Counter[str] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    hangs: Counter[str] = field(default_factory=Counter)  # stopped for good
    num_floods: int = 0
    flooding: int = 0  # floods that are on
    latencies_s: list[float] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)  # of what was wrong

    @property
    def unaccounted(self) -> int:
        """Requests of which nothing is known."""
        return self.sent - self.right - self.wrong - self.refused - self.errors.total() - self.lost


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
        lines = [line[6:] for line in bytes(answer.body).split(b"\n") if line.startswith(b"data: ")]  # no comments
        if lines.count(b"[DONE]") != 1 or lines.pop() != b"[DONE]":
            return "not exactly one [DONE] at the end"
        events = lines
    try:
        decoded = [json.loads(event) for event in events]
    except ValueError:
        return f"not JSON: {bytes(answer.body[:500])!r}"
    for event in decoded:
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
    few = asyncio.Semaphore(RIGHT_ANSWERS_AT_ONCE)

    async def right_answer(question: Question) -> Any:
        async with few:
            connection, answer = await ask(target, None, question)
        bar.update()
        if connection is not None:
            connection.close()
        if answer.error or answer.status != 200:
            raise RuntimeError(f"no answer to {question.path}: {answer.error} {bytes(answer.body[:300])!r}")
        return content(question, answer)

    with tqdm(total=len(asked), desc="right answers", leave=False, file=sys.stderr) as bar:
        return await asyncio.gather(*map(right_answer, asked))


async def ask_and_judge(
    target: Target, connection: Connection | None, question: Question, right: Any, tally: Tally
) -> Connection | None:
    """Ask one question and count what came of it."""
    tally.sent += 1
    start_s = time.monotonic()
    flooded = tally.flooding
    connection, answer = await ask(target, connection, question)
    tally.latencies_s.append(time.monotonic() - start_s)
    if answer.error == "timeout":
        tally.lost += 1
        if connection is not None:
            connection.close()
    elif answer.error == REFUSED and (flooded or tally.flooding):
        tally.refused += 1
    elif answer.error:
        tally.errors[answer.error] += 1
        tally.examples.append(f"{answer.error}: {bytes(answer.body[-300:])!r}")
    elif (got := content(question, answer)) == right:
        tally.right += 1
    else:
        tally.wrong += 1
        tally.examples.append(f"{question.body | {'prompt': '...'}}:\n  got   {got}\n  right {right}")
    return connection


async def client(
    target: Target, asked: Sequence[Question], right: Sequence[Any], rng: random.Random, until_s: float, tally: Tally
) -> None:
    """Ask at random, one question after the other, until the time is over."""
    connection = None
    while time.monotonic() < until_s:
        index = rng.randrange(len(asked))
        connection = await ask_and_judge(target, connection, asked[index], right[index], tally)
        if tally.flooding:
            await asyncio.sleep(FLOODED_PAUSE_S)  # as one who was told to come back later
    if connection is not None:
        connection.close()


async def flood(target: Target, asked: Sequence[Question], right: Sequence[Any], count: int, tally: Tally) -> None:
    """So many short questions at once; each gets its right answer or is told that it is too much."""
    short = [index for index, question in enumerate(asked) if len(json.dumps(question.body)) < SHORT_BYTES]
    tally.num_floods += 1
    tally.flooding += 1
    indices = [short[number % len(short)] for number in range(count)]
    connections = await asyncio.gather(
        *(ask_and_judge(target, None, asked[index], right[index], tally) for index in indices)
    )
    tally.flooding -= 1
    for connection in connections:
        if connection is not None:
            connection.close()
