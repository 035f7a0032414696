"""Words that must not come out, as sequences of token ids. Tokenizer worker; pure."""

from __future__ import annotations

from tokservice.tokenizer.encode import Encoder
from tokservice.wire.errors import RequestError
from tokservice.wire.messages import EngineLimits

MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256


def bad_words_ids(words: list[str] | None, encoder: Encoder, limits: EngineLimits) -> tuple[tuple[int, ...], ...]:
    """The ids of each word, as it is written at the beginning of a text and after a blank. Raises RequestError (400).

    Other ways to write a word in tokens are not excluded.
    """
    if not words:
        return ()
    if len(words) > MAX_BAD_WORDS:
        raise _invalid(f"'bad_words' may hold at most {MAX_BAD_WORDS} words.")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            raise _invalid(f"Each of the 'bad_words' must have 1 to {MAX_BAD_WORD_CHARS} characters, not only blanks.")
        for text in (word, f" {word.lstrip()}"):
            ids = encoder.encode(text, add_special_tokens=False, limits=limits, param="bad_words")
            if len(ids):
                found[tuple(ids)] = None
    return tuple(found)


def _invalid(message: str) -> RequestError:
    return RequestError(message, param="bad_words", code="invalid_value")
