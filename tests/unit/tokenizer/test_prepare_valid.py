"""What a valid request becomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.preparers import CHAT, LIMITS, NOW, PROMPT, TOKENIZER, VOCAB_SIZE, ids, make, prepared
from tokservice.protocol import context as contexts
from tokservice.tokenizer.prepare import Preparer
from tokservice.wire.messages import Route


def test_completion(preparer: Preparer) -> None:
    result = prepared(preparer, **PROMPT)
    token_ids = TOKENIZER.encode("hello world").ids
    assert ids(result) == [token_ids]
    assert (result.stream, result.num_choices, result.num_prompt_tokens) == (False, 1, len(token_ids))
    assert (result.sampling.max_tokens, result.sampling.n, result.sampling.seed) == (16, 1, 2**63 - 1)
    context = contexts.decode(result.context)
    assert (context.route, context.created, context.model) == (Route.COMPLETIONS, 1700000000, "tiny")
    assert context.response_id == "cmpl-" + "f" * 32


def test_chat(preparer: Preparer) -> None:
    result = prepared(preparer, **CHAT, stream=True, stream_options={"include_usage": True})
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert ids(result) == [TOKENIZER.encode(text, add_special_tokens=False).ids]
    assert result.sampling.max_tokens == LIMITS.max_model_len - result.num_prompt_tokens
    context = contexts.decode(result.context)
    assert (context.stream, context.include_usage, context.continuous_usage) == (True, True, False)
    assert context.response_id.startswith("chatcmpl-")


def test_a_body_in_pieces(preparer: Preparer) -> None:
    raw = json.dumps(PROMPT).encode()
    pieces = [raw[:7], memoryview(raw)[7:9], bytearray(raw[9:])]
    assert preparer.prepare(Route.COMPLETIONS, pieces, NOW) == preparer.prepare(Route.COMPLETIONS, [raw], NOW)


def test_all_prompt_forms(preparer: Preparer) -> None:
    """Lists got 422 though evaluation tools always send lists: tt-inference-server#3532."""
    one, two = TOKENIZER.encode("hello").ids, TOKENIZER.encode("world").ids
    assert ids(prepared(preparer, prompt="hello")) == [one]
    assert ids(prepared(preparer, prompt=["hello", "world"])) == [one, two]
    assert ids(prepared(preparer, prompt=one)) == [one]
    result = prepared(preparer, prompt=[one, two, one], n=2, best_of=2)
    assert (ids(result), result.num_choices) == ([one, two, one], 6)
    assert contexts.decode(result.context).num_prompt_tokens == (len(one), len(two), len(one))


def test_a_long_prompt_leaves_its_neighbours_their_room(preparer: Preparer) -> None:
    """Every answer was cut to what the longest prompt of the request left of the context."""
    room = LIMITS.max_model_len - 2
    result = prepared(preparer, prompt=[[5] * 60, [5, 6]], max_tokens=40, min_tokens=20)
    assert (result.sampling.max_tokens, result.sampling.min_tokens) == (40, 20)
    result = prepared(preparer, prompt=[[5] * 60, [5, 6]], max_tokens=400, min_tokens=300)
    assert (result.sampling.max_tokens, result.sampling.min_tokens) == (room, room)


def test_sampling_fields(preparer: Preparer) -> None:
    fields = {
        "n": 3,
        "max_tokens": 5,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": -1,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.2,
        "seed": 42,
        "ignore_eos": True,
        "priority": -3,
    }
    sampling = prepared(
        preparer, **PROMPT, **fields, stop_token_ids=[5, 5, 6], logit_bias={"7": -100, "8": 1.5}, user="u"
    ).sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert sampling.stop_token_ids == (5, 6)
    assert (sampling.logit_bias_ids, sampling.logit_bias_values) == ((7, 8), (-100.0, 1.5))


def test_output_fields(preparer: Preparer) -> None:
    context = contexts.decode(
        prepared(
            preparer,
            **PROMPT,
            stop=["a", "b", "a"],
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            min_tokens=3,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False},
        ).context
    )
    assert (context.stop, context.include_stop, context.skip_special_tokens) == (("a", "b"), True, False)
    assert (context.min_tokens, context.continuous_usage) == (3, True)


def test_every_field_may_be_null(preparer: Preparer) -> None:
    """Explicit null for an optional field failed an assertion: vllm#19862."""
    for route, body in ((Route.COMPLETIONS, PROMPT), (Route.CHAT_COMPLETIONS, CHAT)):
        readers: dict[Route, Any] = {Route.COMPLETIONS: preparer._completions, Route.CHAT_COMPLETIONS: preparer._chats}
        names = [name for name in readers[route]._decoder.type.__struct_fields__ if name not in body]
        expected = preparer.prepare(route, [json.dumps(body).encode()], NOW)
        for nulls in (names, *([name] for name in names)):
            raw = json.dumps(body | dict.fromkeys(nulls)).encode()
            assert preparer.prepare(route, [raw], NOW) == expected


def test_bookkeeping_of_the_client_is_accepted(preparer: Preparer) -> None:
    prepared(preparer, **CHAT, user="u", metadata={"a": ["b"]}, store=False, service_tier="auto", model="tiny")


def test_neutral_values_of_unsupported_fields_are_accepted(preparer: Preparer) -> None:
    prepared(preparer, **PROMPT, echo=False, suffix="", logprobs=None, response_format={"type": "text"}, bad_words=[])
    prepared(preparer, **CHAT, logprobs=False, top_logprobs=0, tools=[], tool_choice="none", parallel_tool_calls=True)


def test_nul_is_kept(preparer: Preparer) -> None:
    """A NUL silently cut the prompt: llama.cpp#25543."""
    text = "one\x00two"
    assert ids(prepared(preparer, prompt=text)) == [TOKENIZER.encode(text).ids]
    assert len(ids(prepared(preparer, prompt=text))[0]) > len(ids(prepared(preparer, prompt="one"))[0])


def test_one_bos_in_chat_and_the_tokenizers_default_in_completions(with_bos: Preparer) -> None:
    """The template wrote a BOS and encoding added another: vllm#2012."""
    assert ids(prepared(with_bos, **CHAT))[0].count(1) == 1
    assert ids(prepared(with_bos, **PROMPT))[0].count(1) == 1
    assert ids(prepared(with_bos, **PROMPT, add_special_tokens=False))[0].count(1) == 0
    assert ids(prepared(with_bos, **CHAT, add_special_tokens=True))[0].count(1) == 2


def test_prompts_without_text_are_marked(with_bos: Preparer) -> None:
    assert contexts.decode(prepared(with_bos, prompt=["", "hello"]).context).bare_prompts == (0,)


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB_SIZE, 2147483648, 9999999, -5])
def test_top_k_beyond_the_vocabulary_is_off(preparer: Preparer, top_k: int) -> None:
    """Large values crashed the scheduler: sglang#17788."""
    assert prepared(preparer, **PROMPT, top_k=top_k).sampling.top_k == 0


def test_tiny_temperatures_are_greedy(preparer: Preparer) -> None:
    assert prepared(preparer, **PROMPT, temperature=1e-300).sampling.temperature == 0
    assert prepared(preparer, **PROMPT, temperature=0).sampling.temperature == 0


@pytest.mark.parametrize("seed", [-1, 0, -(2**63), 2**63 - 1])
def test_seeds_are_63_bits(preparer: Preparer, seed: int) -> None:
    assert 0 <= prepared(preparer, **PROMPT, seed=seed).sampling.seed < 2**63


def test_the_models_own_defaults(tmp_path: Path) -> None:
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True}
    own = make(tmp_path, generation_config=config)
    sampling = prepared(own, **PROMPT).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.6, 0.95, 20, 1.1)
    assert prepared(own, **PROMPT, temperature=0, top_k=-1).sampling.temperature == 0
    assert prepared(own, **PROMPT, top_k=-1).sampling.top_k == 0


def test_bad_words(preparer: Preparer) -> None:
    found = prepared(preparer, **PROMPT, bad_words=["hello", "hello"]).sampling.bad_words_ids
    assert set(found) == {tuple(TOKENIZER.encode("hello").ids), tuple(TOKENIZER.encode(" hello").ids)}
