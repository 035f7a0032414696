"""Guided decoding on the default model: the output follows the guide, also after a restart."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.core import EngineCore, EngineRequest
from engine.torch_core.guide import Guide, GuideFailed, GuideMaker
from tests.helpers.tiny_models import COMMON, assert_empty, drain, ids_of, make_engine, request
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


def save_tiny_talker(folder: Path, **config: Any) -> Path:
    """A tiny model with the tokenizer of the default one, which has 49152 ids."""
    import transformers

    torch.manual_seed(1)
    spec = transformers.LlamaConfig(**COMMON | {"vocab_size": 49152} | config)
    transformers.LlamaForCausalLM(spec).save_pretrained(folder)
    shutil.copy(ensure_default_model() / "tokenizer.json", folder)
    return folder


@pytest.mark.parametrize(
    "config",
    [{"vocab_size": 49000}, {"vocab_size": 49408}, {"eos_token_id": None}],
    ids=["more tokens than the model", "fewer tokens than the model", "no eos"],
)
def test_vocabularies_that_do_not_match(tmp_path: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Tokens that the model lacks were the end of all guides; without an eos a guided answer went on to its limit."""
    engine = make_engine(save_tiny_talker(tmp_path, **config))
    engine.add(guided(tokenizer, "regex", "[0-9]{4}", min_tokens=3))
    outputs = drain(engine)
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert re.fullmatch("[0-9]{4}", tokenizer.decode(ids_of(outputs, "r"), skip_special_tokens=True))
    assert_empty(engine)


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
def test_bad_guides_end_their_request_alone(engine: EngineCore, tokenizer: Tokenizer, kind: str, guide: str) -> None:
    engine.add(request("mate", [5, 6, 7], max_tokens=3, ignore_eos=True))
    engine.add(guided(tokenizer, kind, guide, n=2))
    outputs = drain(engine)
    assert [(o.token_ids, o.finish_reason) for o in outputs if o.request_id == "r"] == [
        ((), FinishReason.GUIDE_FAILED)
    ] * 2
    assert len(ids_of(outputs, "mate")) == 3
    assert_empty(engine)


def test_journal_that_breaks_the_guide_ends_its_request_alone(engine: EngineCore, tokenizer: Tokenizer) -> None:
    one = guided(tokenizer, "regex", "[0-9]+")
    journal = (np.array(tokenizer.encode("letters").ids, np.uint32),)
    engine.add(EngineRequest("r", 2, one.sampling, one.prompts, journal))
    assert [output.finish_reason for output in drain(engine)] == [FinishReason.GUIDE_FAILED]
    assert_empty(engine)


@pytest.mark.parametrize("regex", ["a{1000000}", "(.{0,40}[aeiou]){50}"])
def test_a_guide_that_grows_too_complex_is_not_our_failure(
    engine: EngineCore, tokenizer: Tokenizer, regex: str
) -> None:
    """It was a 500, which official clients send again, and again."""
    engine.add(request("mate", [5, 6, 7], max_tokens=3, ignore_eos=True))
    engine.add(guided(tokenizer, "regex", regex))
    outputs = drain(engine)
    assert outputs[-1].finish_reason is FinishReason.GUIDE_FAILED
    assert len(ids_of(outputs, "mate")) == 3
    assert_empty(engine)


def test_a_complete_guide_ends_before_min_tokens(engine: EngineCore, tokenizer: Tokenizer) -> None:
    """The guide allows the end alone, min_tokens forbids it: nothing could follow, and the choice was an error."""
    engine.add(guided(tokenizer, "regex", "[0-9]{4}", min_tokens=20))
    outputs = drain(engine)
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert re.fullmatch("[0-9]{4}", tokenizer.decode(ids_of(outputs, "r"), skip_special_tokens=True))


def test_choices_of_a_request_have_guides_of_their_own(engine: EngineCore, tokenizer: Tokenizer) -> None:
    engine.add(guided(tokenizer, "regex", "[0-9]{3}[a-z]{3}", n=3, seed=4, temperature=1.5))
    outputs = drain(engine)
    texts = [tokenizer.decode(ids_of(outputs, "r", choice), skip_special_tokens=True) for choice in range(3)]
    assert all(re.fullmatch("[0-9]{3}[a-z]{3}", text) for text in texts)
    assert len(set(texts)) == 3


def drive(guide: Guide, token: int, count: int) -> None:
    for _ in range(count):
        guide.allowed()
        guide.accept(token)


def test_an_ambiguous_grammar_fails_before_its_masks_stall_others(tokenizer: Tokenizer) -> None:
    """Masks are computed between everybody's steps: those of an ambiguous grammar cost more with every token."""
    maker = GuideMaker(ensure_default_model(), tokenizer.get_vocab_size(), (2,), 0)
    rules = [f'r{i}: "x" | r{i} r{i}' for i in range(40)]
    grammar = "\n".join([f"start: ({' | '.join(f'r{i}' for i in range(40))})*", *rules])
    (guide,) = maker.make("grammar", grammar, [np.zeros(0, np.uint32)])
    (token,) = tokenizer.encode("x").ids
    drive(guide, token, 2)
    with pytest.raises(GuideFailed, match="Too many items"):
        drive(guide, token, 13)


@pytest.fixture
def held(engine: Any, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No guide is compiled until the event is set."""
    event = threading.Event()
    make = GuideMaker.make

    def make_later(*args: Any) -> Any:
        event.wait(60)
        return make(*args)

    monkeypatch.setattr(GuideMaker, "make", make_later)
    return event


def test_others_run_while_a_guide_is_compiled(engine: EngineCore, tokenizer: Tokenizer, held: threading.Event) -> None:
    """Compiled inside the step loop, a guide stalled every stream, and the heartbeats with them."""
    engine.add(guided(tokenizer, "regex", "[0-9]{4}"))
    engine.add(request("mate", [5, 6, 7], max_tokens=20, ignore_eos=True))
    outputs = []
    for _ in range(20):
        assert engine.has_work()
        outputs += engine.step()
    assert len(ids_of(outputs, "mate")) == 20
    assert engine.stats.num_waiting == 1
    assert engine.step() == []  # an idle engine waits for the guide, but not for long
    held.set()
    assert re.fullmatch("[0-9]{4}", tokenizer.decode(ids_of(drain(engine), "r"), skip_special_tokens=True))
    assert_empty(engine)


def test_abort_while_a_guide_is_compiled(engine: EngineCore, tokenizer: Tokenizer, held: threading.Event) -> None:
    engine.add(guided(tokenizer, "regex", "[0-9]{4}", n=3))
    assert engine.step() == []
    engine.abort("r", 1)
    assert [(o.choice, o.finish_reason) for o in engine.step()] == [(1, FinishReason.ABORT)]
    engine.abort("r")
    assert [(o.choice, o.finish_reason) for o in engine.step()] == [(0, FinishReason.ABORT), (2, FinishReason.ABORT)]
    assert_empty(engine)
    held.set()
    engine.add(guided(tokenizer, "regex", "[0-9]{4}", n=2))
    assert {output.choice for output in drain(engine)} == {0, 1}
    assert_empty(engine)


def test_a_choice_aborted_while_its_guide_is_compiled_stays_ended(
    engine: EngineCore, tokenizer: Tokenizer, held: threading.Event
) -> None:
    engine.add(guided(tokenizer, "regex", "[0-9]{4}", n=2))
    engine.abort("r", 0)
    outputs = engine.step()
    held.set()
    outputs += drain(engine)
    assert [output.finish_reason for output in outputs if output.choice == 0] == [FinishReason.ABORT]
    assert re.fullmatch("[0-9]{4}", tokenizer.decode(ids_of(outputs, "r", 1), skip_special_tokens=True))
    assert_empty(engine)


def test_a_higher_attempt_while_a_guide_is_compiled(
    engine: EngineCore, tokenizer: Tokenizer, held: threading.Event
) -> None:
    """The guide of the attempt that was given up must not begin anything."""
    one = guided(tokenizer, "regex", "[0-9]{4}")
    engine.add(one)
    engine.step()
    journal = (np.array(tokenizer.encode("12").ids, np.uint32),)
    engine.add(EngineRequest("r", 2, one.sampling, one.prompts, journal))
    engine.add(one)
    held.set()
    outputs = drain(engine)
    assert {output.attempt for output in outputs} == {2}
    assert re.fullmatch("[0-9]{2}", tokenizer.decode(ids_of(outputs, "r"), skip_special_tokens=True))
    assert_empty(engine)


def test_gaps_of_streams_do_not_grow_by_the_time_of_a_compilation(tmp_path: Path) -> None:
    """The library must compile without the GIL: else a thread of its own would not help."""
    engine: Any = make_engine(save_tiny_talker(tmp_path))
    cross = [{"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {}}} for j in "ab"]} for i in range(10)]
    schema = json.dumps({"allOf": cross})  # too complex, as turns out at the end
    engine.add(request("mate", [5, 6, 7], max_tokens=400, ignore_eos=True))
    engine.step()
    engine.add(request("r", [5], guide_kind="json_schema", guide=schema))
    gaps = []
    while engine._guides.num_waiting:
        start = time.perf_counter()
        engine.step()
        gaps.append(time.perf_counter() - start)
    assert max(gaps) < sum(gaps) / 2, "a step took as long as the compilation"
