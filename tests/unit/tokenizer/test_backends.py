from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.helpers import tiny_tokenizers
from tokservice.tokenizer.backends import HuggingFaceBackend
from tokservice.wire.errors import StartupError


@pytest.mark.parametrize("make", [tiny_tokenizers.byte_level, tiny_tokenizers.byte_fallback])
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_equal_those_of_the_reference(
    tmp_path: Path, make: Callable[[], Tokenizer], add_special_tokens: bool
) -> None:
    tokenizer = make()
    tiny_tokenizers.write_model(tmp_path, tokenizer)
    backend = HuggingFaceBackend(tmp_path)
    text = "hello <|im_end|> world \x00 日本語 😀 </s>"
    expected = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    assert backend.encode(text, add_special_tokens=add_special_tokens) == expected.ids
    assert [backend.token(token_id) for token_id in expected.ids] == expected.tokens
    assert backend.token(10**6) is None
    assert backend.decode(expected.ids) == tokenizer.decode(expected.ids, skip_special_tokens=False)
    assert backend.size == tokenizer.get_vocab_size()


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(tiny_tokenizers.byte_level().to_str())
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    tiny_tokenizers.write_model(tmp_path, tokenizer)
    ids = HuggingFaceBackend(tmp_path).encode("hello world in the house", add_special_tokens=True)
    assert ids == tiny_tokenizers.byte_level().encode("hello world in the house").ids


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": 5}'])
def test_unreadable_files_are_startup_errors(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        HuggingFaceBackend(tmp_path)
