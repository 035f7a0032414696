"""Guided decoding: which tokens keep an output within a JSON schema, regular expression, grammar or choice.

Engine process. llguidance does the work; it is imported with the first guided request. A guide's state is a function
of the output tokens, so a continued request gets it back by replaying them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.core import RequestRefused


class GuideFailed(RuntimeError):
    """The guide cannot go on (its grammar grew too complex): the fault of its own request."""


class Guide:
    """The state of one guided choice."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> npt.NDArray[np.bool_]:
        """(vocab_size,) the tokens that may come next; eos where the output may end. Raises GuideFailed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)

    def accept(self, token: int) -> None:
        """The output goes on with an allowed token. Raises GuideFailed."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GuideFailed(self._matcher.get_error())


class GuideMaker:
    """Compiles guides for one tokenizer."""

    def __init__(self, model_dir: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: Any = None

    def make(self, kind: str, text: str, output_ids: Iterable[int]) -> Guide:
        """A guide that stands after ``output_ids``. Raises RequestRefused where the text is no such grammar."""
        import llguidance

        if self._tokenizer is None:
            path = self._model_dir / "tokenizer.json"
            if not path.is_file():
                raise RequestRefused("guided decoding needs the model's tokenizer.json")
            eos = list(self._eos_token_ids) or None
            self._tokenizer = llguidance.LLTokenizer(str(path), n_vocab=self._vocab_size, eos_token=eos)
        try:
            grammar = _grammar(llguidance.LLMatcher, kind, text)
        except ValueError as error:
            raise RequestRefused(f"guide: {error}") from error
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise RequestRefused(f"guide: {matcher.get_error()}")
        guide = Guide(matcher, self._vocab_size)
        try:
            for token in output_ids:
                guide.accept(int(token))
        except GuideFailed as error:
            raise RequestRefused(f"guide: the output so far does not follow it: {error}") from error
        return guide


def _grammar(matcher: Any, kind: str, text: str) -> str:
    """llguidance's form of a guide. "choice" holds a JSON array of strings. Raises ValueError."""
    if kind == "json_schema":
        return str(matcher.grammar_from_json_schema(text))
    if kind == "regex":
        return str(matcher.grammar_from_regex(text))
    if kind == "choice":
        choices = json.loads(text)
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
            raise ValueError("a choice is a JSON array of strings")
        return str(matcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices)))
    return str(matcher.grammar_from_lark(text))
