"""Prompts of a given number of tokens for benchmarks, and the tokenizer that counts them."""

from __future__ import annotations

import sys
from array import array
from pathlib import Path

from _corpus import text
from _qwen3 import qwen3_folder
from tokenizers import Tokenizer

from tokservice.models.default_model import ensure_default_model

_CHARS_PER_TOKEN = 6  # more than any vocabulary of today packs into a token of this text


class Prompts:
    """Cuts of one long text, so that it is encoded once."""

    def __init__(self, tokenizer: Tokenizer, num_tokens: int) -> None:
        """``num_tokens``: of the text; longer prompts repeat it."""
        source = text(num_tokens * _CHARS_PER_TOKEN, seed=0)
        offsets = tokenizer.encode_batch([source], add_special_tokens=False)[0].offsets
        self._ends = array("q", (end for _, end in offsets[:num_tokens]))
        self._source = source[: self._ends[-1]]

    def cut(self, num_tokens: int, index: int = 0) -> str:
        """A text of so many tokens (cut between tokens it may come out one longer or shorter), another by index."""
        whole, rest = divmod(num_tokens, len(self._ends))
        if not rest:
            return self._source * whole
        first = index * rest % (len(self._ends) - rest)
        start = self._ends[first - 1] if first else 0
        return self._source * whole + self._source[start : self._ends[first + rest - 1]]

    def cuts(self, num_tokens: int, number: int) -> list[str]:
        """Several."""
        return [self.cut(num_tokens, index) for index in range(number)]


def benchmark_tokenizer() -> Path:
    """The folder of Qwen3's tokenizer, or of the default model where that cannot be had. Raises StartupError."""
    try:
        return qwen3_folder()
    except RuntimeError as error:
        print(f"{error}; taking the default model's tokenizer", file=sys.stderr)
        return ensure_default_model()
