from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from tests.helpers import tiny_tokenizers
from tokservice.detokenizer import vocabulary
from tokservice.wire.errors import StartupError


def id_of(tokenizer: Tokenizer, token: str) -> int:
    return tokenizer.get_vocab()[token]


def test_byte_level_table_joins_to_the_text() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    table = vocabulary.build(tiny_tokenizers.parsed(tokenizer))
    text = "Grüße, 日本語 😀\x00\n tabs\t\xa0 nbsp \x7f"
    assert b"".join(table.all_bytes[i] for i in tokenizer.encode(text).ids).decode() == text
    assert not table.strips_leading_space


def test_every_byte_level_token_equals_the_tokenizers_own_decoding() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    table = vocabulary.build(tiny_tokenizers.parsed(tokenizer))
    for token_id in range(tokenizer.get_vocab_size()):
        expected = tokenizer.decode([token_id], skip_special_tokens=False)
        assert table.all_bytes[token_id].decode("utf-8", "replace") == expected


def test_byte_fallback_table_knows_bytes_and_blanks() -> None:
    tokenizer = tiny_tokenizers.byte_fallback()
    table = vocabulary.build(tiny_tokenizers.parsed(tokenizer))
    assert table.all_bytes[id_of(tokenizer, "<0x0A>")] == b"\n"
    assert table.all_bytes[id_of(tokenizer, "▁in▁the")] == b" in the"
    assert table.strips_leading_space


def test_special_tokens_are_invisible_and_added_ones_are_not() -> None:
    """An added token that is not special (a reasoning tag) is text, without blanks around it: vllm#33457."""
    tokenizer = tiny_tokenizers.byte_level()
    table = vocabulary.build(tiny_tokenizers.parsed(tokenizer))
    for name in tiny_tokenizers.SPECIAL:
        token_id = id_of(tokenizer, name)
        assert table.visible_bytes[token_id] == b""
        assert table.all_bytes[token_id] == name.encode()
    for name in ("<think>", "two words"):
        assert table.visible_bytes[id_of(tokenizer, name)] == name.encode()
    ended = table.table(skip_special=True, stops=["<|im_end|>", "<think>", "x"])
    assert len(ended) == len(table.visible_bytes)
    assert [place for place, seen in enumerate(ended) if seen != table.visible_bytes[place]] == [
        id_of(tokenizer, "<|im_end|>")
    ]


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.CTC(), decoders.BPEDecoder()])
def test_decoders_that_look_at_neighbours_are_refused(decoder: decoders.Decoder | None) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(StartupError, match="decoder"):
        vocabulary.build(tiny_tokenizers.parsed(tokenizer))


def test_gemma_like_decoder_keeps_the_leading_blank() -> None:
    parsed = tiny_tokenizers.parsed(tiny_tokenizers.byte_fallback())
    parsed["decoder"]["decoders"] = parsed["decoder"]["decoders"][:3]
    assert not vocabulary.build(parsed).strips_leading_space


def test_unigram_vocabularies_are_lists() -> None:
    table = vocabulary.build(
        {"model": {"vocab": [["<unk>", 0.0], ["▁a", -1.0]]}, "decoder": {"type": "Metaspace", "replacement": "▁"}}
    )
    assert list(table.all_bytes) == [b"<unk>", b" a"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", json.dumps({"model": {"vocab": 3}})])
def test_unreadable_tokenizer_files_are_startup_errors(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        vocabulary.load(tmp_path)


def test_missing_tokenizer_file_is_a_startup_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        vocabulary.load(tmp_path)
