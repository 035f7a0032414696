"""A detokenizer without its sockets' other ends: the turns that requests take, the mark of what it died over."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import tiny_tokenizers
from tests.helpers.contexts import context
from tests.helpers.router import ids
from tokservice.detokenizer.detokenizer_proc import Detokenizer
from tokservice.detokenizer.logprob_rows import About, LogprobRows, write_note
from tokservice.detokenizer.respond import Fed, Responder
from tokservice.detokenizer.token_names import TokenNames
from tokservice.runtime.config import from_dict, save
from tokservice.runtime.links import RouterLink
from tokservice.runtime.metrics import Metrics
from tokservice.runtime.process import CONFIG_FILE, Process, ProcessName
from tokservice.runtime.work_mark import take_mark
from tokservice.wire.messages import (
    Abort,
    Begin,
    EngineOutputs,
    FinishReason,
    Message,
    Progress,
    PromptLogprobs,
    ReadyFlags,
    Role,
    Route,
    Undelivered,
)

ENGINE, DETOKENIZER = "engine.0.1", "detokenizer.0.1"
FATAL = 77


def begin(request_id: str) -> Begin:
    return Begin(request_id, 3, ENGINE, frames=(context(route=Route.COMPLETIONS),))


def outputs(*tokens: int) -> EngineOutputs:
    """A step: one new token for each of the requests 0, 1, ..."""
    count = len(tokens)
    names = tuple(f"api.0.1:{index}" for index in range(count))
    return EngineOutputs(names, (3,) * count, (0,) * count, (1,) * count, (0,) * count, frames=(ids(*tokens),))


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ts", dir="/tmp") as path:
        tiny_tokenizers.write_model(Path(path) / "model", tiny_tokenizers.byte_level())
        save(from_dict({"model": {"path": f"{path}/model", "served_name": "m"}}), Path(path) / CONFIG_FILE)
        yield Path(path)


def test_the_mark_names_the_request_that_ends_the_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests at a dead detokenizer were to blame for it, whether it had looked at them or not."""
    feed_text = Responder.feed_text

    def fragile(responder: Responder, choice: int, token_ids: Any, *more: Any) -> Fed | None:
        if FATAL in token_ids:
            raise MemoryError
        return feed_text(responder, choice, token_ids, *more)

    monkeypatch.setattr(Responder, "feed_text", fragile)
    process = Process(ProcessName(Role.DETOKENIZER, 0, 1), folder)
    worker = Detokenizer(process)
    for index in range(3):
        worker._on_message(begin(f"api.0.1:{index}"))
    worker._on_message(outputs(70, 71, 72))
    assert (folder / f"{DETOKENIZER}.working").read_bytes()[0] == 0, "it is idle"
    with pytest.raises(MemoryError):
        worker._on_message(outputs(73, FATAL, 74))
    process.close()
    assert take_mark(folder, DETOKENIZER) == ("api.0.1:1", 3)


def test_the_mark_names_a_request_that_cannot_even_begin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fragile(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Responder, "__init__", fragile)
    process = Process(ProcessName(Role.DETOKENIZER, 0, 1), folder)
    with pytest.raises(MemoryError):
        Detokenizer(process)._on_message(begin("api.0.1:7"))
    process.close()
    assert take_mark(folder, DETOKENIZER) == ("api.0.1:7", 3)


# --- turns ----------------------------------------------------------------------------------------------------

LONG, SHORT = "api.0.1:0", "api.0.1:1"
PROMPT = [70] * 3000


class Bench:
    """A worker whose messages to the router are kept."""

    def __init__(self, process: Process, sent: list[Message]) -> None:
        self._process = process
        self.worker = Detokenizer(process)
        self._sent = sent

    def tell(self, *messages: Message) -> None:
        for message in messages:
            self.worker._on_message(message)

    def turn(self) -> bool:
        """Whether it wants another one at once."""
        return self.worker.turn(0.0) == 0.0

    @property
    def listens(self) -> bool:
        """Whether it reads what engines say."""
        return self.worker._inbox.socket in self._process._poller

    def take(self) -> list[Message]:
        """What was sent since the last time."""
        sent = self._sent.copy()
        self._sent.clear()
        return sent


@pytest.fixture
def bench(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    sent: list[Message] = []
    monkeypatch.setattr(RouterLink, "send", lambda _, message: sent.append(message))
    process = Process(ProcessName(Role.DETOKENIZER, 0, 1), folder)
    yield Bench(process, sent)
    process.close()


def row(request_id: str, token: int, reason: FinishReason = FinishReason.RUNNING) -> EngineOutputs:
    tokens = () if reason == FinishReason.ABORT else (token,)
    return EngineOutputs((request_id,), (3,), (0,), (len(tokens),), (reason,), frames=(ids(*tokens),))


def begin_long(bench: Bench, reason: FinishReason) -> None:
    """A request whose report on its prompt takes many slices, and one that only wants its text."""
    fields = {"stream": False, "num_prompt_tokens": (len(PROMPT),), "num_prompt_logprobs": 1}
    frame = context(route=Route.COMPLETIONS, prompt_ids=(ids(*PROMPT),), **fields)
    num_entries = 2 * (len(PROMPT) - 1)
    rows = (ids(*[70] * num_entries), struct.pack(f"<{num_entries}f", *[-1.0] * num_entries))
    bench.tell(Begin(LONG, 3, ENGINE, frames=(frame,)), begin(SHORT))
    bench.tell(PromptLogprobs(LONG, 3, 0, 1, frames=rows), row(LONG, 71, reason))
    assert bench.take() == []


def test_others_have_their_turn_while_a_prompt_is_reported(bench: Bench) -> None:
    """Their texts waited until all of it was written."""
    begin_long(bench, FinishReason.LENGTH)
    num_turns = 0
    while bench.turn():
        assert bench.take() == [], "it is not done yet"
        bench.tell(row(SHORT, 72))
        (progress,) = bench.take()
        assert isinstance(progress, Progress)
        assert (progress.request_ids, progress.num_tokens) == ((SHORT,), (1,))
        num_turns += 1
    assert num_turns > 5
    (progress,) = bench.take()
    assert isinstance(progress, Progress)
    assert (progress.request_ids, progress.num_tokens, progress.statuses) == ((LONG,), (1,), (200,))
    assert progress.flags[0] & ReadyFlags.LAST
    (choice,) = json.loads(progress.frames[1])["choices"]
    assert len(choice["prompt_logprobs"]) == len(PROMPT)


def test_the_report_on_a_prompt_ends_when_its_client_goes(bench: Bench) -> None:
    begin_long(bench, FinishReason.RUNNING)
    assert bench.turn()
    bench.tell(row(LONG, 72), row(LONG, 0, FinishReason.ABORT))
    (progress,) = bench.take()
    assert isinstance(progress, Progress)
    assert (progress.request_ids, progress.num_bytes, progress.flags) == ((LONG,), (0,), (ReadyFlags.LAST,))
    assert not bench.turn()
    bench.tell(row(LONG, 73))
    assert bench.take() == []


def test_the_report_on_a_prompt_ends_with_its_attempt(bench: Bench) -> None:
    begin_long(bench, FinishReason.RUNNING)
    bench.worker._from_router(Abort(LONG, 3))
    assert not bench.turn()
    assert bench.take() == []


def test_a_new_attempt_takes_the_place_of_a_report(bench: Bench) -> None:
    begin_long(bench, FinishReason.RUNNING)
    bench.tell(Begin(LONG, 4, ENGINE, frames=(context(route=Route.COMPLETIONS),)))
    assert not bench.turn()
    bench.tell(row(LONG, 73))
    assert bench.take() == [], "of the attempt before"


def test_the_mark_names_the_request_whose_turn_it_is(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_long(bench, FinishReason.LENGTH)
    assert bench.turn()
    assert (folder / f"{DETOKENIZER}.working").read_bytes()[0] == 0, "it waits for its next turn"

    def fragile(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(TokenNames, "entry", fragile)
    with pytest.raises(MemoryError):
        bench.turn()
    assert take_mark(folder, DETOKENIZER) == (LONG, 3)


def test_notes_that_turn_out_to_be_malformed_are_not_delivered(bench: Bench) -> None:
    block = write_note(About.OUTPUT, LogprobRows(1, [70], [-1.0]))
    frames = (context(num_logprobs=0), ids(*[70] * 3000), block * 3000 + b"x")
    bench.tell(Begin(LONG, 3, ENGINE, (3000,), (0,), has_notes=True, frames=frames))
    assert bench.turn(), "its first notes are right"
    while bench.turn():
        pass
    assert bench.take() == [Undelivered((LONG,), (3,))]
    assert bench.worker.report(Metrics())[1] == 0


def test_nothing_is_read_while_too_much_waits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read while a report is written has to be kept. The process beats and hears the router all the while."""
    monkeypatch.setattr("tokservice.detokenizer.detokenizer_proc.MAX_WAITING", 5)
    begin_long(bench, FinishReason.RUNNING)
    for _ in range(10):
        bench.tell(row(LONG, 72))
    assert bench.turn()
    assert not bench.listens
    while bench.turn():
        pass
    assert bench.listens
