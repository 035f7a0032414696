"""What is refused, and the field that the refusal names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.preparers import CHAT, PROMPT, TOKENIZER, TOOL, VOCAB_SIZE, ids, make, prepared, refused
from tokservice.tokenizer.prepare import Preparer
from tokservice.wire.messages import EngineLimits, Route


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], [[5], []], ["a", ""]])
def test_empty_prompts_are_refused(preparer: Preparer, prompt: Any) -> None:
    """They killed the engine's loop: vllm#7283."""
    error = refused(preparer, {"prompt": prompt})
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", "prompt")


@pytest.mark.parametrize("wrong", [VOCAB_SIZE, VOCAB_SIZE + 1, 2**31, 2**63, 2**64, 2**200, -1, -(2**63)])
def test_token_ids_outside_the_vocabulary_are_refused(preparer: Preparer, wrong: int) -> None:
    """vllm#9634, vllm#51795, vllm#54195"""
    assert refused(preparer, {"prompt": [5, wrong]}).param == "prompt"
    assert refused(preparer, {"prompt": [[5], [5, wrong]]}).param == "prompt"
    assert refused(preparer, PROMPT | {"stop_token_ids": [wrong]}).param == "stop_token_ids"
    assert refused(preparer, PROMPT | {"logit_bias": {str(wrong): -100}, "min_tokens": 2}).param == "logit_bias"
    assert refused(preparer, {"tokens": [wrong]}, Route.DETOKENIZE).param == "tokens"


def test_padding_rows_of_the_embedding_are_valid_prompt_ids(preparer: Preparer) -> None:
    """vllm#44682"""
    assert ids(prepared(preparer, prompt=[VOCAB_SIZE - 1])) == [[VOCAB_SIZE - 1]]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("prompt", [None, 5, {}, ["a", 5], [5, [5]], [5.0], [True], [["a"]], [[[5]]], [None]]),
        ("n", [0, -1, 129, 1_000_000, 1.5, "1", True]),
        ("best_of", [2, 0]),
        ("max_tokens", [0, -1, 1.0, "5", [], True]),
        ("min_tokens", [-1, 17]),
        ("temperature", [-0.1, "hot", [], True]),
        ("top_p", [0, -1, 1.01]),
        ("top_k", [0.5, 1e3, "5"]),
        ("min_p", [-0.1, 1.1]),
        ("presence_penalty", [2.1, -2.1]),
        ("frequency_penalty", [2.1, -2.1]),
        ("repetition_penalty", [0, -1]),
        ("seed", [2**63, -(2**63) - 1, 1.5]),
        ("priority", [2**31]),
        ("stop", ["", ["", "END"], ["END", ""], [None], 5, [["a"]], ["a"] * 0 + list("abcdefghijklmnopq"), "x" * 257]),
        ("logit_bias", [{"a": 1}, {"1.5": 1}, {"5": 101}, {"5": None}, []]),
        ("stop_token_ids", [[1.5], ["a"], 5, [None]]),
        ("truncate_prompt_tokens", [0, -2]),
        ("stream", [1, "true"]),
        ("stream_options", [{"include_usage": True}, {}, {"unknown": 1}, 5]),
        ("ignore_eos", [1]),
        ("user", [5]),
        ("store", [True]),
        ("model", [5]),
        ("echo", [1, "true"]),
        ("suffix", ["x"]),
        ("logprobs", [-1, 21, True, 1.5]),
        ("prompt_logprobs", [-1, 21, False]),
        ("bad_words", [[""], [" "], [5], "a", ["x" * 257], ["a"] * 129]),
        ("response_format", ["json", {"type": "xml"}, {"type": "json_schema"}, {"type": "text", "json_schema": {}}]),
        ("response_format", [{"type": "json_schema", "json_schema": {"name": "x"}}]),
        ("guided_json", [[], 5, "x", "[1]", {"type": "objec"}, {"$ref": "#/x"}, {"enum": ["x" * 40_000]}]),
        ("guided_regex", ["a(", "(?=a)b", 5, "x" * 40_000]),
        ("guided_choice", [[], [""], "a", ["a"] * 1025]),
        ("guided_grammar", ["start: b", "root ::= (", "x" * 40_000]),
        ("structured_outputs", [{}, {"json": {}, "regex": "a"}, {"regex": "("}, {"x": 1}, {"structural_tag": "a"}]),
        ("return_token_ids", [1]),
        ("allowed_token_ids", [[5]]),
        ("spaces_between_special_tokens", [0, "no"]),
        ("use_beam_search", [True]),
        ("no_such_field", [None, 1]),
        ("tools", [None]),  # a field of chat alone
    ],
)
def test_wrong_values_are_refused_and_named(preparer: Preparer, field: str, values: list[Any]) -> None:
    for value in values:
        error = refused(preparer, PROMPT | {field: value})
        assert (error.status, error.param) == (400, field), (value, error)
        json.loads(error.body())


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("messages", [None, [], "hi", [{}], [{"role": "bot", "content": "x"}], [{"role": "user", "content": 5}]]),
        ("messages", [[{"role": "user", "content": "x", "mood": "good"}], [{"role": "user", "content": ["x"]}]]),
        ("max_completion_tokens", [0, -1]),
        ("tools", [[{"type": "custom", "function": {"name": "f"}}], [{"type": "function"}], [TOOL, TOOL], {}]),
        ("tools", [[{"function": {"name": "a b"}}], [{"function": {"name": "f", "parameters": 5}}]]),
        ("tool_choice", ["required", "any", {"type": "function", "function": {"name": "f"}}]),
        ("parallel_tool_calls", ["no"]),
        ("logprobs", [1, "true"]),
        ("top_logprobs", [2, -1, 21]),
        ("max_tokens", [0]),
        ("echo", [True]),
        ("chat_template", ["{{ 1 }}"]),
        ("chat_template_kwargs", [{"messages": []}, 5, {"bos_token": "x", "strftime_now": 1}]),
        ("modalities", [["text", "audio"]]),
        ("prompt", ["x"]),
        ("best_of", [1]),
    ],
)
def test_wrong_values_in_chat_are_refused_and_named(preparer: Preparer, field: str, values: list[Any]) -> None:
    for value in values:
        error = refused(preparer, CHAT | {field: value}, Route.CHAT_COMPLETIONS)
        assert (error.status, error.param) == (400, field), (value, error)


def test_both_names_of_max_tokens(preparer: Preparer) -> None:
    assert prepared(preparer, **CHAT, max_completion_tokens=3).sampling.max_tokens == 3
    assert prepared(preparer, **CHAT, max_completion_tokens=3, max_tokens=3).sampling.max_tokens == 3
    assert refused(preparer, CHAT | {"max_completion_tokens": 3, "max_tokens": 4}).param == "max_completion_tokens"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"not json",
        b"\xef\xbb\xbf{}",
        b'{"prompt":"\xff\xfe"}',
        b'{"prompt":"\xed\xa0\x80"}',
        rb'{"prompt":"\ud800"}',
        rb'{"prompt":"\ud800 text"}',
        rb'{"prompt":"\udc00\ud800"}',
        b'{"prompt":"a\nb"}',
        b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","temperature":Infinity}',
        b'{"prompt":"a"} {}',
        b"[" * 20_000,
        b'{"prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"prompt":"a","metadata":' + b'{"a":' * 1000 + b"1" + b"}" * 1000 + b"}",
    ],
)
def test_bodies_that_are_not_valid_json_are_refused(preparer: Preparer, body: bytes) -> None:
    """Deep nesting raised RecursionError: Rapid-MLX#798."""
    assert refused(preparer, body).status == 400


def test_numbers_out_of_range_are_named(preparer: Preparer) -> None:
    assert refused(preparer, b'{"prompt":"a","temperature":1e999}').param == "temperature"
    for field in ("n", "seed", "max_tokens", "stop_token_ids", "prompt"):
        for num_digits in (30, 4300, 5000):
            number = (b"-1" if field == "max_tokens" else b"1") + b"0" * (num_digits - 1)
            value = number if field in ("n", "seed", "max_tokens") else b"[" + number + b"]"
            body = b'{"prompt":["a","b"],"%b":%b}' % (field.encode(), value)
            assert refused(preparer, body).param == field


def test_another_model_is_not_found(preparer: Preparer) -> None:
    """Any model name was accepted and echoed: sglang#31404."""
    for route, body in (
        (Route.COMPLETIONS, PROMPT),
        (Route.CHAT_COMPLETIONS, CHAT),
        (Route.TOKENIZE, PROMPT),
        (Route.DETOKENIZE, {"tokens": [5]}),
    ):
        error = refused(preparer, body | {"model": "no-such-model"}, route)
        assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


def test_too_many_choices_are_refused_before_fan_out(preparer: Preparer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request could exhaust memory: gpt4all#3635."""
    monkeypatch.setattr(preparer._encoder, "_backend", None)
    assert refused(preparer, {"prompt": ["a"] * 100_000}).param == "prompt"
    assert refused(preparer, {"prompt": ["a"] * 65, "n": 2}).param == "n"
    assert refused(preparer, CHAT | {"n": 1_000_000}).param == "n"


def test_a_model_without_template_refuses_chat(tmp_path: Path) -> None:
    bare = make(tmp_path, chat_template=None)
    assert refused(bare, CHAT).code == "no_chat_template"


def test_tokens_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    small = make(tmp_path)
    small.set_limits(EngineLimits(max_model_len=64, vocab_size=300))
    assert refused(small, {"prompt": "<think>"}).param == "prompt"


def test_a_template_that_loops_for_ever_costs_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokservice.tokenizer.chat_template.MAX_RENDER_S", 0.05)
    monkeypatch.setattr("tokservice.tokenizer.chat_template.MAX_RENDERED_CHARS", 5000)
    loop = "{% for i in range(90000) %}"
    silent_loops = f"{loop}{loop}{{% endfor %}}{{% endfor %}}"
    endless = f"{{% if messages[0].content == 'silent' %}}{silent_loops}{{% endif %}}"
    loud = "{% if messages[0].content == 'loud' %}{% for i in range(90000) %}xxxxxxxx{% endfor %}{% endif %}fine"
    looping = make(tmp_path, chat_template=endless + loud)
    silent = refused(looping, {"messages": [{"role": "user", "content": "silent"}]})
    assert (silent.code, silent.param) == ("template_timeout", "messages")
    assert "characters" in refused(looping, {"messages": [{"role": "user", "content": "loud"}]}).message
    assert ids(prepared(looping, **CHAT)) == [TOKENIZER.encode("fine").ids]
