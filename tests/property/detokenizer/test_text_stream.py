from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.helpers import tiny_tokenizers
from tokservice.detokenizer import vocabulary
from tokservice.detokenizer.text_stream import TextStream
from tokservice.models.default_model import ensure_default_model

BYTE_LEVEL = tiny_tokenizers.byte_level()
BYTE_FALLBACK = tiny_tokenizers.byte_fallback()
TABLES = {id(made): vocabulary.build(tiny_tokenizers.parsed(made)) for made in (BYTE_LEVEL, BYTE_FALLBACK)}

cuts = st.lists(st.integers(0, 5), max_size=60)


def joined(table: vocabulary.Vocabulary, token_ids: list[int], sizes: list[int], *, skip_special: bool) -> str:
    """The text in pieces of the given sizes, then token by token."""
    stream = TextStream(
        table.visible_bytes if skip_special else table.all_bytes, strip_leading_space=table.strips_leading_space
    )
    shown, place = "", 0
    for size in [*sizes, *[1] * len(token_ids)]:
        shown += stream.push(token_ids[place : place + size])
        place += size
    return shown + stream.flush()


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=60), cuts, st.booleans())
def test_byte_level_deltas_join_to_the_full_decoding(token_ids: list[int], sizes: list[int], skip: bool) -> None:
    """Any ids, broken UTF-8 and special tokens among them, in any pieces."""
    expected = BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip)
    assert joined(TABLES[id(BYTE_LEVEL)], token_ids, sizes, skip_special=skip) == expected


@given(st.text(max_size=60), cuts)
def test_byte_fallback_deltas_join_to_the_full_decoding(text: str, sizes: list[int]) -> None:
    token_ids = BYTE_FALLBACK.encode(text).ids
    expected = BYTE_FALLBACK.decode(token_ids)
    assert joined(TABLES[id(BYTE_FALLBACK)], token_ids, sizes, skip_special=True) == expected == text


@given(st.lists(st.integers(0, BYTE_FALLBACK.get_vocab_size() - 1), max_size=60), cuts, st.booleans())
def test_byte_fallback_deltas_of_any_ids_join_to_the_decoded_bytes(
    token_ids: list[int], sizes: list[int], skip: bool
) -> None:
    """With invalid bytes the library gives U+FFFD for every byte of a run, good ones too: the bytes are the rule."""
    table = TABLES[id(BYTE_FALLBACK)]
    pieces = table.visible_bytes if skip else table.all_bytes
    expected = b"".join(pieces[i] for i in token_ids).removeprefix(b" ").decode("utf-8", "replace")
    assert joined(table, token_ids, sizes, skip_special=skip) == expected


def test_default_model_deltas_join_to_the_full_decoding() -> None:
    model_dir = ensure_default_model()
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    table = vocabulary.load(model_dir)
    size = tokenizer.get_vocab_size()

    @given(st.lists(st.integers(0, size - 1), max_size=60), cuts, st.booleans())
    def check(token_ids: list[int], sizes: list[int], skip: bool) -> None:
        assert joined(table, token_ids, sizes, skip_special=skip) == tokenizer.decode(
            token_ids, skip_special_tokens=skip
        )

    check()
