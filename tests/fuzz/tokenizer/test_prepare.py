"""Whatever bytes arrive as a body, only RequestError comes out of preparation, and its body is an envelope."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers import tiny_tokenizers
from tokservice.detokenizer import vocabulary
from tokservice.detokenizer.respond import Responder
from tokservice.runtime.config import TokenizerConfig
from tokservice.tokenizer.prepare import Answer, Prepared, Preparer
from tokservice.wire.errors import RequestError
from tokservice.wire.messages import EngineLimits, FinishReason, Route

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SEEDS: list[tuple[Route, dict[str, Any]]] = [
    (
        Route.COMPLETIONS,
        {
            "prompt": ["hello", "world"],
            "model": "tiny",
            "n": 2,
            "max_tokens": 5,
            "stop": ["a", "b"],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "logit_bias": {"5": 1.5},
            "stop_token_ids": [5, 6],
            "temperature": 0.5,
            "truncate_prompt_tokens": 5,
            "seed": 1,
            "metadata": {"a": [1]},
            "echo": False,
        },
    ),
    (Route.COMPLETIONS, {"prompt": [[1, 2], [3]], "top_k": 5, "top_p": 0.5, "min_p": 0.1, "min_tokens": 1}),
    (
        Route.CHAT_COMPLETIONS,
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "5", "tool_call_id": "1"},
                {"role": "assistant", "content": "so"},
            ],
            "add_generation_prompt": False,
            "continue_final_message": True,
            "chat_template_kwargs": {"flag": True},
            "max_completion_tokens": 5,
            "response_format": {"type": "text"},
        },
    ),
    (
        Route.COMPLETIONS,
        {
            "prompt": "hello",
            "echo": True,
            "max_tokens": 0,
            "logprobs": 2,
            "prompt_logprobs": 1,
            "bad_words": ["a", "b c"],
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        },
    ),
    (Route.COMPLETIONS, {"prompt": "a", "guided_choice": ["a", "b"]}),
    (Route.COMPLETIONS, {"prompt": "a", "guided_grammar": 'root ::= [a-z]+ | x\nx ::= "y"'}),
    (Route.COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "[a-z]{2}"}, "n": 2, "best_of": 2}),
    (
        Route.CHAT_COMPLETIONS,
        {
            "messages": [{"role": "user", "content": "x"}],
            "logprobs": True,
            "top_logprobs": 2,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        },
    ),
    *(
        (
            Route.CHAT_COMPLETIONS,
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}}],
                "tool_choice": choice,
                "parallel_tool_calls": False,
            },
        )
        for choice in ("required", "none", {"type": "function", "function": {"name": "f"}})
    ),
    (
        Route.GENERATE,
        {
            "prompt_token_ids": [[1, 2], [3]],
            "sampling_params": {"n": 2, "logprobs": 1, "stop": ["a"], "guided_json": {"type": "object"}},
            "stream": True,
        },
    ),
    (Route.TOKENIZE, {"prompt": "hello", "return_token_strs": True}),
    (Route.TOKENIZE, {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": False}),
    (Route.DETOKENIZE, {"tokens": [1, 2, 3]}),
    (
        Route.RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "reasoning", "id": "1", "summary": [{"type": "summary_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "1", "output": "5"},
                {"type": "message", "role": "assistant", "content": "so", "status": "incomplete"},
            ],
            "instructions": "s",
            "max_output_tokens": 5,
            "metadata": {"a": "b"},
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "tool_choice": "auto",
            "text": {"format": {"type": "text"}},
            "stream": True,
            "top_k": 5,
        },
    ),
    (
        Route.RESPONSES,
        {
            "input": "x",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
            "reasoning": {"effort": None},
        },
    ),
]
NUMBERS = [0, -1, 1, 0.5, 1e300, -1e300, 2**31, 2**63, 2**64, 10**400, 129, True, False, None]
STRINGS = ["", "a", "\x00", "\u2028", "😀", "{{ 7*7 }}", "<|im_end|>", "x" * 300, "assistant", "__class__"]
VALUES = [*NUMBERS, *STRINGS, [], {}, [[]], [None], {"": None}, ["a", 1], {"self": 1}, {"type": "text"}]


@pytest.fixture(scope="module")
def preparer(tmp_path_factory: pytest.TempPathFactory) -> Preparer:
    folder = tiny_tokenizers.write_model(tmp_path_factory.mktemp("model"), tiny_tokenizers.byte_level())
    made = Preparer(model_dir=folder, model_name="tiny", chat_template_file="", settings=TokenizerConfig())
    made.set_limits(EngineLimits(max_model_len=64, vocab_size=500))
    return made


def mutated(body: Any, rng: random.Random) -> Any:
    """A copy with some value replaced, dropped, wrapped or doubled."""
    if rng.random() < 0.2:
        return rng.choice(VALUES)
    if isinstance(body, dict) and body:
        key = rng.choice(list(body))
        changed = {name: mutated(value, rng) if name == key else value for name, value in body.items()}
        if rng.random() < 0.1:
            changed[rng.choice(STRINGS)] = rng.choice(VALUES)
        if rng.random() < 0.1:
            del changed[key]
        return changed
    if isinstance(body, list) and body:
        place = rng.randrange(len(body))
        return [*body[:place], mutated(body[place], rng), *body[place + rng.choice([0, 1]) :]]
    return rng.choice([rng.choice(VALUES), [body], {"a": body}])


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
    """The other end understands it."""
    assert len(result.prompts) * result.sampling.n == result.num_choices <= 128
    assert sum(map(len, result.prompts)) == 4 * result.num_prompt_tokens > 0
    assert 0 <= result.sampling.max_tokens <= 64 - max(map(len, result.prompts)) // 4
    responder = Responder(VOCABULARY, result.context)
    for choice in range(result.num_choices):
        last = responder.feed(choice, [5, 300, 301], FinishReason.LENGTH)
    assert last.last


VOCABULARY = vocabulary.build(tiny_tokenizers.parsed(tiny_tokenizers.byte_level()))


def run(preparer: Preparer, num_bodies: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(num_bodies):
        route, body = rng.choice(SEEDS)
        for _ in range(rng.randint(0, 3)):
            body = mutated(body, rng)
        raw = bytearray(json.dumps(body, ensure_ascii=rng.random() < 0.5).encode())
        if rng.random() < 0.3:
            for _ in range(rng.randint(1, 4)):
                place = rng.randrange(len(raw) + 1)
                raw[place : place + rng.randint(0, 2)] = rng.choice(
                    [b"", b'"', b"\\", b"[", b"}", b"\xff", b"\\ud800", b"9"]
                )
        check(preparer, route, bytes(raw))


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
