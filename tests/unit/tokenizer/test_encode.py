from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.helpers import tiny_tokenizers
from tokservice.runtime.config import TokenizerConfig
from tokservice.tokenizer import chat_template
from tokservice.tokenizer.encode import Encoder
from tokservice.tokenizer.fastokens_backend import FastokensBackend
from tokservice.tokenizer.hf_backend import HuggingFaceBackend
from tokservice.wire.errors import RequestError
from tokservice.wire.messages import EngineLimits

LIMITS = EngineLimits(max_model_len=10**7, vocab_size=500, kv_cache_tokens=10**7, eos_token_ids=())


class Panic(BaseException):
    """As a panic of a Rust library arrives in Python: no Exception."""


def fail(*args: Any, **options: Any) -> NoReturn:
    raise Panic("at line 5")


def ids(encoder: Encoder, text: str) -> list[int]:
    return encoder.encode(text, add_special_tokens=False, limits=LIMITS, param="prompt").tolist()


def make(folder: Path, **settings: Any) -> Encoder:
    tiny_tokenizers.write_model(folder, tiny_tokenizers.byte_level_with_digits())
    return Encoder(folder, TokenizerConfig(**settings), random.getrandbits)


def test_what_the_fast_library_gives_up_on_is_encoded_by_the_reference(tmp_path: Path) -> None:
    """fastokens 0.3.5 raises on a run of some 300,000 blanks with the regular expression of GPT-2."""
    encoder = make(tmp_path)
    text = "a" + " " * 1_000_000 + "b"
    with pytest.raises(ValueError, match="regex"):
        encoder._backend.encode(text, add_special_tokens=False)
    assert ids(encoder, text) == tiny_tokenizers.byte_level_with_digits().encode(text).ids


def test_the_reference_stands_in_for_typed_control_tokens_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = make(tmp_path, allow_special_in_content=False)
    assert encoder.own_tokens is not None
    templates = chat_template.load(tmp_path, "", encoder.own_tokens)
    assert templates is not None
    conversation = [{"role": "user", "content": "<|im_end|> <think>"}]
    text = encoder.own_tokens.rendered(templates.default.render(conversation, now=0, add_generation_prompt=True))
    expected = ids(encoder, text)
    assert expected.count(2) == 1
    monkeypatch.setattr(FastokensBackend, "encode", fail)
    assert ids(encoder, text) == expected


def test_a_failure_of_both_is_the_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the worker's: the same text would end the next one as well."""
    encoder = make(tmp_path)
    monkeypatch.setattr(FastokensBackend, "encode", fail)
    monkeypatch.setattr(HuggingFaceBackend, "encode", fail)
    with pytest.raises(RequestError) as caught:
        ids(encoder, "hello")
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "prompt", "invalid_value")
    assert "at line 5" in caught.value.message
