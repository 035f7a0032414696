from __future__ import annotations

import time

from tests.helpers import tiny_tokenizers
from tokservice.detokenizer import vocabulary
from tokservice.detokenizer.text_stream import TextStream

# A table of single bytes, then some words.
BYTES = [bytes([value]) for value in range(256)]
WORD = 256
TABLE = [*BYTES, b" word", b" in the", b""]


def stream(*, strip_leading_space: bool = False) -> TextStream:
    return TextStream(TABLE, strip_leading_space=strip_leading_space)


def deltas(text_stream: TextStream, token_ids: list[int]) -> list[str]:
    return [text_stream.push([token_id]) for token_id in token_ids] + [text_stream.flush()]


def test_a_character_is_held_until_complete() -> None:
    """Streams showed U+FFFD for emoji cut into byte tokens: llama.cpp#4446."""
    assert deltas(stream(), list("😀".encode())) == ["", "", "", "😀", ""]


def test_a_token_may_end_one_character_and_begin_another() -> None:
    table = ["é😀".encode()[:4], "é😀".encode()[4:]]
    text_stream = TextStream(table, strip_leading_space=False)
    assert deltas(text_stream, [0, 1]) == ["é", "😀", ""]


def test_invalid_bytes_become_one_replacement_and_the_stream_goes_on() -> None:
    """A lone lead byte before a word ended the request with 'invalid prefix': vllm#17448."""
    assert deltas(stream(), [0xC3, 0xA9, 0xC3, WORD]) == ["", "é", "", "\ufffd word", ""]


def test_an_unfinished_character_at_the_end_is_flushed() -> None:
    assert deltas(stream(), [0x61, 0xE6, 0x97]) == ["a", "", "", "\ufffd"]


def test_a_run_of_byte_fragments_costs_constant_time_and_shows_text() -> None:
    """4,000 byte fragments in a row took seconds and gave no text: sglang#34740."""
    num_tokens = 20_000
    for fragment in (0xF0, 0x80, 0xE6):
        text_stream = stream()
        begin = time.process_time()
        text = "".join(deltas(text_stream, [fragment] * num_tokens))
        assert time.process_time() - begin < 2
        assert text == "\ufffd" * num_tokens


def test_at_most_three_bytes_are_held() -> None:
    for token_ids in ([0xF0, 0x9F, 0x98], [0xF0, 0x9F, 0x98, 0xF0], [0xE6, 0x97], [0xF4, 0x8F, 0xBF]):
        text_stream = stream()
        for token_id in token_ids:
            text_stream.push([token_id])
        assert 0 < len(text_stream.flush()) <= 3


def test_tokens_without_text_and_ids_past_the_table_add_nothing() -> None:
    """Ids of padding rows of the embedding broke the decoder: vllm#44682."""
    text_stream = stream()
    assert text_stream.push([WORD, 258, 10_000_000]) == " word"
    assert text_stream.push([10_000_000]) == ""
    assert text_stream.push([]) == ""
    assert text_stream.flush() == ""


def test_only_the_synthetic_blank_before_the_text_is_dropped() -> None:
    """A first token of two words lost the blank between them: tokenizers#2212."""
    assert deltas(stream(strip_leading_space=True), [257, WORD]) == ["in the", " word", ""]
    assert deltas(stream(strip_leading_space=False), [257]) == [" in the", ""]
    assert deltas(stream(strip_leading_space=True), [258, 0x20, 0x20]) == ["", "", " ", ""]


def test_words_keep_their_blanks_token_by_token() -> None:
    """Decoding SentencePiece tokens one by one glued the words together: transformers#22710."""
    tokenizer = tiny_tokenizers.byte_fallback()
    table = vocabulary.build(tiny_tokenizers.parsed(tokenizer))
    token_ids = tokenizer.encode("hello world in the house 日本語").ids
    text_stream = TextStream(table.visible_bytes, strip_leading_space=table.strips_leading_space)
    assert "".join(deltas(text_stream, token_ids)) == "hello world in the house 日本語" == tokenizer.decode(token_ids)
