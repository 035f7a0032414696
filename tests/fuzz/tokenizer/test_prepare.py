"""Whatever bytes arrive as a body, only RequestError comes out of preparation, and its body is an envelope."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.checks import check_request
from engine.core import EngineRequest
from tests.helpers import mutated_bodies, tiny_tokenizers
from tokservice.detokenizer import vocabulary
from tokservice.detokenizer.respond import Responder
from tokservice.runtime.config import TokenizerConfig
from tokservice.tokenizer.prepare import Answer, Prepared, Preparer
from tokservice.wire.errors import RequestError
from tokservice.wire.messages import EngineLimits, FinishReason, Route

LIMITS = EngineLimits(max_model_len=64, vocab_size=500)


@pytest.fixture(scope="module")
def preparer(tmp_path_factory: pytest.TempPathFactory) -> Preparer:
    folder = tiny_tokenizers.write_model(tmp_path_factory.mktemp("model"), tiny_tokenizers.byte_level())
    made = Preparer(
        model_dir=folder, model_name=mutated_bodies.MODEL, chat_template_file="", settings=TokenizerConfig()
    )
    made.set_limits(LIMITS)
    return made


def check(preparer: Preparer, route: Route, body: bytes) -> None:
    try:
        result = preparer.prepare(route, [body], 1.5)
    except RequestError as error:
        check_refusal(error)
        return
    if isinstance(result, Answer):
        json.loads(result.body)
        return
    check_prepared(result)


def check_refusal(error: RequestError) -> None:
    envelope = json.loads(error.body())["error"]
    assert 400 <= error.status < 500
    assert 0 < len(envelope["message"]) < 1000


def check_prepared(result: Prepared) -> None:
    """The other ends understand it, and take it."""
    prompts = tuple(np.frombuffer(prompt, np.uint32) for prompt in result.prompts)
    check_request(EngineRequest("x", 1, result.sampling, prompts), LIMITS)
    assert len(result.prompts) * result.sampling.n == result.num_choices <= 128
    assert sum(map(len, result.prompts)) == 4 * result.num_prompt_tokens > 0
    assert 0 <= result.sampling.max_tokens <= 64 - max(map(len, result.prompts)) // 4
    responder = Responder(VOCABULARY, result.context)
    for choice in range(result.num_choices):
        last = responder.feed(choice, [5, 300, 301], FinishReason.LENGTH)
    assert last.last


VOCABULARY = vocabulary.build(tiny_tokenizers.parsed(tiny_tokenizers.byte_level()))


def run(preparer: Preparer, num_bodies: int, seed: int) -> None:
    for route, body in mutated_bodies.bodies(seed, num_bodies):
        check(preparer, route, body)


def test_mutated_bodies(preparer: Preparer) -> None:
    run(preparer, 4000, seed=1)


@pytest.mark.slow
def test_many_mutated_bodies(preparer: Preparer) -> None:
    run(preparer, 100_000, seed=2)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.sampled_from(list(Route)))
def test_random_bytes(preparer: Preparer, body: bytes, route: Route) -> None:
    check(preparer, route, body)


@pytest.mark.parametrize("file", sorted((Path(__file__).parent / "corpus").iterdir()), ids=lambda file: file.stem)
def test_past_failures(preparer: Preparer, file: Path) -> None:
    """Bodies that raise something else in a careless implementation."""
    for route in Route:
        check(preparer, route, file.read_bytes())
