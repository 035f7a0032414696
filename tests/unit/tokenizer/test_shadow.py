from __future__ import annotations

import hashlib
from array import array
from pathlib import Path

import pytest

from tests.helpers import tiny_tokenizers
from tokservice.runtime.config import TokenizerConfig
from tokservice.tokenizer.hf_backend import HuggingFaceBackend
from tokservice.tokenizer.prepare import Preparer
from tokservice.tokenizer.shadow import ShadowCheck
from tokservice.wire.messages import EngineLimits, Route

TEXT = "hello secret world"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceBackend:
    folder = tiny_tokenizers.write_model(tmp_path_factory.mktemp("model"), tiny_tokenizers.byte_level())
    return HuggingFaceBackend(folder / "tokenizer.json")


def test_equal_ids_are_a_match_once(reference: HuggingFaceBackend) -> None:
    check = ShadowCheck(lambda: reference, 1.0, lambda bits: 2**bits - 1)
    assert check.run() is None
    check.note(TEXT, True, False, reference.encode(TEXT, add_special_tokens=True))
    assert check.run() is True
    assert check.run() is None


def test_a_mismatch_is_logged_without_the_text(reference: HuggingFaceBackend, caplog: pytest.LogCaptureFixture) -> None:
    check = ShadowCheck(lambda: reference, 1.0, lambda bits: 0)
    check.note(TEXT, False, False, array("I", [5]))
    assert check.run() is False
    assert hashlib.sha256(TEXT.encode()).hexdigest() in caplog.text
    assert f"num_chars={len(TEXT)}" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(("rate", "random", "chosen"), [(0.25, 2**30 - 1, True), (0.25, 2**30, False)])
def test_chance_chooses(reference: HuggingFaceBackend, rate: float, random: int, chosen: bool) -> None:
    check = ShadowCheck(lambda: reference, rate, lambda bits: random)
    check.note(TEXT, False, False, array("I", [5]))
    assert (check.run() is not None) == chosen


@pytest.mark.parametrize("allow_special", [True, False])
def test_what_a_worker_encodes_is_compared(tmp_path: Path, allow_special: bool) -> None:
    settings = TokenizerConfig(shadow_check_rate=1.0, allow_special_in_content=allow_special)
    tiny_tokenizers.write_model(tmp_path, tiny_tokenizers.byte_level())
    preparer = Preparer(model_dir=tmp_path, model_name="m", chat_template_file="", settings=settings)
    preparer.set_limits(EngineLimits(max_model_len=500, vocab_size=500, kv_cache_tokens=1000, eos_token_ids=(2,)))
    assert preparer.shadow_check() is None
    preparer.prepare(Route.COMPLETIONS, [b'{"prompt": "hello <|im_end|>"}'], 0)
    assert preparer.shadow_check() is True
    preparer.prepare(Route.CHAT_COMPLETIONS, [b'{"messages": [{"role": "user", "content": "a <|im_end|>"}]}'], 0)
    assert preparer.shadow_check() is True


def test_the_reference_is_not_compared_with_itself(tmp_path: Path) -> None:
    tiny_tokenizers.write_model(tmp_path, tiny_tokenizers.byte_level())
    settings = TokenizerConfig(shadow_check_rate=1.0, backend="hf")
    preparer = Preparer(model_dir=tmp_path, model_name="m", chat_template_file="", settings=settings)
    preparer.set_limits(EngineLimits(max_model_len=500, vocab_size=500, kv_cache_tokens=1000, eos_token_ids=(2,)))
    preparer.prepare(Route.COMPLETIONS, [b'{"prompt": "hello"}'], 0)
    assert preparer.shadow_check() is None
