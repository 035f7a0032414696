"""Text for benchmarks: a seeded mix of English-like prose and code. Nothing is downloaded; the same text everywhere.

Words are made of syllables and drawn by Zipf's law, so that a tokenizer meets a few words often and many rarely,
as in real text. (A handful of repeated words would be served from its cache.)
"""

from __future__ import annotations

import itertools
import random

_COMMON = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "it",
    "for",
    "was",
    "on",
    "are",
    "as",
    "with",
    "be",
    "by",
    "at",
    "this",
    "have",
    "from",
    "or",
    "an",
    "they",
    "which",
    "one",
    "had",
    "not",
    "but",
    "what",
    "all",
    "were",
    "when",
    "we",
    "there",
    "can",
    "your",
    "said",
    "if",
    "do",
    "will",
    "each",
    "about",
    "how",
    "up",
    "out",
    "them",
    "then",
    "she",
    "many",
    "some",
    "so",
    "these",
    "would",
    "other",
    "into",
    "has",
    "more",
    "her",
    "two",
    "like",
    "him",
    "see",
    "time",
    "could",
    "no",
    "make",
    "than",
    "first",
    "been",
    "its",
    "who",
    "now",
    "people",
    "over",
    "down",
    "only",
    "way",
    "find",
    "use",
    "may",
    "water",
    "long",
    "little",
    "very",
    "after",
    "words",
    "called",
    "just",
    "where",
    "most",
    "know",
    "get",
    "through",
    "back",
]
_ONSETS = [
    "b",
    "c",
    "d",
    "f",
    "g",
    "h",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "w",
    "br",
    "ch",
    "cl",
    "cr",
    "dr",
    "fl",
    "gr",
    "pl",
    "pr",
    "sh",
    "sl",
    "sp",
    "st",
    "str",
    "th",
    "tr",
    "wh",
]
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "ee", "ou", "io"]
_CODAS = ["", "", "", "n", "r", "s", "t", "l", "nd", "nt", "ck", "st", "ng", "tion", "ment", "ly"]
_RARE_WORDS = 8000


def text(num_chars: int, seed: int) -> str:
    """At least so many characters."""
    source = _Source(random.Random(seed))
    parts: list[str] = []
    length = 0
    while length < num_chars:
        parts.append(source.paragraph() if len(parts) % 3 else source.function())
        length += len(parts[-1])
    return "".join(parts)


class _Source:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        words = [*_COMMON, *(self._word() for _ in range(_RARE_WORDS))]
        weights = list(itertools.accumulate(1 / rank for rank in range(1, len(words) + 1)))
        self._words = iter(lambda: rng.choices(words, cum_weights=weights, k=1)[0], None)

    def _word(self) -> str:
        syllables = (
            self._rng.choice(_ONSETS) + self._rng.choice(_VOWELS) for _ in range(self._rng.choice((1, 2, 2, 3)))
        )
        return "".join(syllables) + self._rng.choice(_CODAS)

    def _take(self, count: int) -> list[str]:
        return list(itertools.islice(self._words, count))

    def paragraph(self) -> str:
        sentences = []
        for _ in range(self._rng.randint(3, 8)):
            words = self._take(self._rng.randint(6, 22))
            words[len(words) // 2] += self._rng.choice(("", "", ",", ";"))
            sentences.append(" ".join(words).capitalize() + self._rng.choice((".", ".", ".", "?", "!")))
        return " ".join(sentences) + "\n\n"

    def function(self) -> str:
        lines = [f"def {'_'.join(self._take(2))}({', '.join(self._take(3))}):"]
        for _ in range(self._rng.randint(3, 12)):
            left, right, attribute = self._take(3)
            number = self._rng.randint(0, 4096)
            lines.append(
                self._rng.choice(
                    (
                        f"    {left} = {right}.{attribute}({number})",
                        f"    if {left} > {number}:\n        return {right}[{attribute}]",
                        f'    {left}["{attribute}"] += {right} * {number / 8}',
                        f"    # {' '.join(self._take(6))}",
                    )
                )
            )
        return "\n".join(lines) + "\n\n"
