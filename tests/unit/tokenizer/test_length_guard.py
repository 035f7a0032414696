from __future__ import annotations

from typing import Any

import pytest
from tokenizers import normalizers, pre_tokenizers

from tests.helpers import tiny_tokenizers
from tokservice.tokenizer.length_guard import max_chars_per_token


def changed(**parts: Any) -> dict[str, Any]:
    return tiny_tokenizers.parsed(tiny_tokenizers.byte_level()) | parts


def test_the_longest_token_is_the_bound() -> None:
    parsed = changed()
    longest = max(map(len, [*parsed["model"]["vocab"], *(token["content"] for token in parsed["added_tokens"])]))
    assert max_chars_per_token(parsed) == longest
    assert max_chars_per_token(changed(normalizer={"type": "NFC"})) == 4 * longest
    assert max_chars_per_token(tiny_tokenizers.parsed(tiny_tokenizers.byte_fallback())) is not None


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "StripAccents"}]}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": " "}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": "  "}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "ByteLevel"}]}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False},
                    {"type": "ByteLevel"},
                ],
            }
        },
        {"pre_tokenizer": None},
        {"added_tokens": [{"id": 0, "content": "x", "special": True, "lstrip": True, "rstrip": False}]},
    ],
)
def test_no_bound_where_a_step_may_swallow_text(parts: dict[str, Any]) -> None:
    assert max_chars_per_token(changed(**parts)) is None


def test_the_names_are_those_that_the_library_writes() -> None:
    assert '"behavior":"Removed"' in str(pre_tokenizers.Split(" ", "removed").__getstate__(), "utf-8")
    assert '"normalizers":' in str(normalizers.Sequence([normalizers.NFC()]).__getstate__(), "utf-8")
