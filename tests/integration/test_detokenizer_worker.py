"""A detokenizer without its sockets' other ends: the mark that it leaves of what it died over."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import tiny_tokenizers
from tests.helpers.contexts import context
from tests.helpers.router import ids
from tokservice.detokenizer.detokenizer_proc import Detokenizer
from tokservice.detokenizer.respond import Fed, Responder
from tokservice.runtime.config import from_dict, save
from tokservice.runtime.process import CONFIG_FILE, Process, ProcessName
from tokservice.runtime.work_mark import take_mark
from tokservice.wire.messages import Begin, EngineOutputs, Role, Route

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
    feed = Responder.feed

    def fragile(responder: Responder, choice: int, token_ids: Any, *more: Any) -> Fed:
        if FATAL in token_ids:
            raise MemoryError
        return feed(responder, choice, token_ids, *more)

    monkeypatch.setattr(Responder, "feed", fragile)
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
