from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.helpers import tiny_tokenizers
from tokservice.tokenizer.backends import AddedToken, Backend
from tokservice.tokenizer.fastokens_backend import FastokensBackend
from tokservice.tokenizer.hf_backend import HuggingFaceBackend
from tokservice.wire.errors import StartupError

KINDS = [HuggingFaceBackend, FastokensBackend]
TEXT = "hello <|im_end|> world \x00 日本語 😀 </s>"


def load(kind: Callable[[Path], Backend], folder: Path, tokenizer: Tokenizer) -> Backend:
    return kind(tiny_tokenizers.write_model(folder, tokenizer) / "tokenizer.json")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [tiny_tokenizers.byte_level, tiny_tokenizers.byte_fallback])
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_equal_those_of_the_reference(
    tmp_path: Path, kind: Callable[[Path], Backend], make: Callable[[], Tokenizer], add_special_tokens: bool
) -> None:
    tokenizer = make()
    backend = load(kind, tmp_path, tokenizer)
    expected = tokenizer.encode(TEXT, add_special_tokens=add_special_tokens)
    ids = backend.encode(TEXT, add_special_tokens=add_special_tokens)
    assert ids.typecode == "I"
    assert ids.tolist() == expected.ids
    assert [backend.token(token_id) for token_id in expected.ids] == expected.tokens
    assert backend.token(10**6) is None
    assert backend.decode(expected.ids) == tokenizer.decode(expected.ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_can_be_text(tmp_path: Path, kind: Callable[[Path], Backend]) -> None:
    """And one call leaves no setting behind for the next: transformers#47085."""
    backend = load(kind, tmp_path, tiny_tokenizers.byte_level())
    for _ in range(2):
        assert 2 in backend.encode(TEXT, add_special_tokens=False)
        as_text = backend.encode(TEXT, add_special_tokens=False, special_as_text=True)
        assert 2 not in as_text
        assert backend.decode(as_text) == TEXT


@pytest.mark.parametrize("kind", KINDS)
def test_added_tokens(tmp_path: Path, kind: Callable[[Path], Backend]) -> None:
    backend = load(kind, tmp_path, tiny_tokenizers.byte_level())
    before = backend.added_tokens()
    size = tiny_tokenizers.byte_level().get_vocab_size()
    assert {token.content for token in before.values()} == {*tiny_tokenizers.SPECIAL, "<think>", "two words"}
    (think,) = (key for key, token in before.items() if token.content == "<think>")
    assert before[think] == AddedToken("<think>", special=False, normalized=True)
    new = [AddedToken("<new>", special=False), AddedToken("<think>", special=True, normalized=True)]
    assert backend.add_tokens(new) == [size, think]
    assert backend.added_tokens() == {**before, size: new[0], think: new[1]}
    ids = backend.encode("<new><think>", add_special_tokens=False, special_as_text=True)
    assert ids[0] == size
    assert think not in ids
    assert think in backend.encode("<new><think>", add_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path, kind: Callable[[Path], Backend]) -> None:
    tokenizer = Tokenizer.from_str(tiny_tokenizers.byte_level().to_str())
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    ids = load(kind, tmp_path, tokenizer).encode("hello world in the house", add_special_tokens=True)
    assert ids.tolist() == tiny_tokenizers.byte_level().encode("hello world in the house").ids


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": 5}'])
def test_unreadable_files_are_startup_errors(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        HuggingFaceBackend(tmp_path / "tokenizer.json")
