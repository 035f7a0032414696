"""Guided decoding on the default model: the output follows the guide, also after a restart."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.core import EngineCore, EngineRequest, RequestRefused
from tests.helpers.tiny_models import drain, ids_of, make_engine, request
from tokservice.models.default_model import ensure_default_model
from tokservice.wire.messages import FinishReason

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ensure_default_model() / "tokenizer.json"))


@pytest.fixture(scope="module")
def engine() -> EngineCore:
    return make_engine(ensure_default_model(), weight_format="auto")


def guided(tokenizer: Tokenizer, kind: str, guide: str, **sampling: Any) -> EngineRequest:
    prompt = tokenizer.encode("Describe a person as JSON:\n").ids
    return request("r", prompt, guide_kind=kind, guide=guide, **({"max_tokens": 40, "temperature": 1.0} | sampling))


@pytest.mark.parametrize(
    ("kind", "guide", "pattern"),
    [
        ("regex", "[a-f]{3}-[0-9]{2}", r"[a-f]{3}-[0-9]{2}"),
        ("choice", '["red", "green blue", "\\"quoted\\""]', r'red|green blue|"quoted"'),
        ("grammar", 'start: "x" NUMBER\nNUMBER: /[0-9]+/', r"x[0-9]+"),
    ],
)
def test_text_follows_the_guide(engine: EngineCore, tokenizer: Tokenizer, kind: str, guide: str, pattern: str) -> None:
    for seed in range(2):
        engine.add(guided(tokenizer, kind, guide, seed=seed))
        outputs = drain(engine)
        if outputs[-1].finish_reason is FinishReason.STOP:  # a number may go on up to max_tokens
            assert re.fullmatch(pattern, tokenizer.decode(ids_of(outputs, "r")))


def test_schema_and_resume(engine: EngineCore, tokenizer: Tokenizer) -> None:
    one = guided(tokenizer, "json_schema", json.dumps(SCHEMA), temperature=0.0)
    engine.add(one)
    outputs = drain(engine)
    ids = ids_of(outputs, "r")
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert set(json.loads(tokenizer.decode(ids))) == {"name", "age"}
    for split in (1, 5, len(ids) - 1):
        journal = (np.array(ids[:split], np.uint32),)
        engine.add(EngineRequest("r", 2, one.sampling, one.prompts, journal))
        assert ids_of(drain(engine), "r") == ids[split:]


@pytest.mark.parametrize(
    ("kind", "guide"),
    [("json_schema", "{"), ("json_schema", '{"type": "sonnet"}'), ("regex", "(("), ("grammar", "??"), ("choice", "[]")],
)
def test_bad_guides_are_refused(engine: EngineCore, tokenizer: Tokenizer, kind: str, guide: str) -> None:
    with pytest.raises(RequestRefused, match="guide"):
        engine.add(guided(tokenizer, kind, guide))
    assert not engine.has_work()


def test_journal_that_breaks_the_guide_is_refused(engine: EngineCore, tokenizer: Tokenizer) -> None:
    one = guided(tokenizer, "regex", "[0-9]+")
    journal = (np.array(tokenizer.encode("letters").ids, np.uint32),)
    with pytest.raises(RequestRefused, match="so far"):
        engine.add(EngineRequest("r", 2, one.sampling, one.prompts, journal))
