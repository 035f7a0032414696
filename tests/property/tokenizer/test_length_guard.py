from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from tests.helpers import tiny_tokenizers
from tokservice.tokenizer.length_guard import max_chars_per_token

# Decomposed characters, which NFC joins; long runs; special tokens.
units = st.sampled_from(
    ["ǖ̀", "u\u0308\u0301", "α\u0313\u0300\u0345", " ", "a", "hello", "<|im_end|>", "two words", "😀"]
)
texts = st.lists(units | st.text(max_size=3), max_size=40).map("".join)


def composing() -> Tokenizer:
    tokenizer = Tokenizer.from_str(tiny_tokenizers.byte_level().to_str())
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


TOKENIZERS = [tiny_tokenizers.byte_level(), tiny_tokenizers.byte_fallback(), composing()]
BOUNDS = [max_chars_per_token(tiny_tokenizers.parsed(tokenizer)) for tokenizer in TOKENIZERS]


@pytest.mark.parametrize("which", range(len(TOKENIZERS)))
@given(text=texts)
def test_no_text_is_longer_than_its_tokens_allow(which: int, text: str) -> None:
    """Or the guard would refuse a prompt that fits."""
    bound = BOUNDS[which]
    assert bound is not None
    num_tokens = len(TOKENIZERS[which].encode(text, add_special_tokens=False).ids)
    assert len(text) <= num_tokens * bound
