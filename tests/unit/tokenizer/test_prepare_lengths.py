"""Prompts around the context length, and what is left for the output."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.preparers import LIMITS, TOKENIZER, VOCAB_SIZE, ids, make, prepared, refused
from tokservice.tokenizer.prepare import Preparer
from tokservice.wire.messages import EngineLimits


def test_prompts_around_the_context_length(preparer: Preparer) -> None:
    """The message spoke of a negative max_tokens: vllm#4667."""
    limit = LIMITS.max_model_len
    assert prepared(preparer, prompt=[5] * (limit - 1)).sampling.max_tokens == 1
    for length in (limit, limit + 1):
        error = refused(preparer, {"prompt": [5] * length})
        assert (error.code, error.param) == ("context_length_exceeded", "prompt")
        assert str(limit) in error.message
        assert str(length) in error.message


def test_too_large_max_tokens_is_cut_to_the_remainder(preparer: Preparer) -> None:
    assert prepared(preparer, prompt=[5] * 60, max_tokens=10**6).sampling.max_tokens == 4
    assert prepared(preparer, prompt=[[5] * 60, [5] * 61], max_tokens=30, min_tokens=20).sampling.max_tokens == 4
    assert prepared(preparer, prompt=[[5] * 60, [5] * 61], max_tokens=30, min_tokens=20).sampling.min_tokens == 4


def test_a_hopeless_text_is_refused_unencoded(preparer: Preparer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparer._encoder, "_backend", None)
    error = refused(preparer, {"messages": [{"role": "user", "content": "a " * 100_000}]})
    assert (error.code, error.param) == ("context_length_exceeded", "messages")


def test_truncation_keeps_the_end_of_the_prompt(preparer: Preparer) -> None:
    text = "one two three " * 1000
    token_ids = TOKENIZER.encode(text).ids
    assert ids(prepared(preparer, prompt=text, truncate_prompt_tokens=5)) == [token_ids[-5:]]
    assert ids(prepared(preparer, prompt=text, truncate_prompt_tokens=-1, max_tokens=4)) == [token_ids[-60:]]
    assert ids(prepared(preparer, prompt=token_ids, truncate_prompt_tokens=5)) == [token_ids[-5:]]
    assert refused(preparer, {"prompt": text, "truncate_prompt_tokens": 1000}).code == "context_length_exceeded"


def test_a_prompt_never_needs_more_than_the_cache_holds(tmp_path: Path) -> None:
    small = make(tmp_path)
    small.set_limits(EngineLimits(max_model_len=64, vocab_size=VOCAB_SIZE, kv_cache_tokens=10))
    assert prepared(small, prompt=[5] * 9).sampling.max_tokens == 1
    assert refused(small, {"prompt": [5] * 10}).code == "context_length_exceeded"
