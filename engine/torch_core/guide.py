"""Guided decoding: which tokens keep an output within a JSON schema, regular expression, grammar or choice.

Engine process. llguidance does the work. A guide's state is a function of the output tokens, so a continued request
gets it back by replaying them. Guides are compiled beside the step loop, see ``guide_queue.py``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from engine.core import RequestRefused, TokenIds

MAX_STEP_ITEMS = 4500  # of the parser, for one mask: an ambiguous grammar ends itself before its masks stall everybody

log = logging.getLogger(__name__)


class GuideFailed(RuntimeError):
    """The guide cannot go on (its grammar grew too complex): the fault of its own request."""


class Guide:
    """The state of one guided choice."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    @property
    def is_complete(self) -> bool:
        """Nothing may come next but the end."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> npt.NDArray[np.bool_]:
        """(vocab_size,) the tokens that may come next; eos where the output may end. Raises GuideFailed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.bool_)

    def accept(self, token: int) -> None:
        """The output goes on with an allowed token. Raises GuideFailed."""
        if not self.is_complete:
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GuideFailed(self._matcher.get_error())


class GuideMaker:
    """Compiles guides for one tokenizer. ``make`` may run in any thread, one at a time."""

    def __init__(self, model_dir: Path, vocab_size: int, eos_token_ids: tuple[int, ...], num_token_ids: int) -> None:
        """Reads the tokenizer now: that takes up to 2 s, in which no other thread can run Python.

        ``num_token_ids``: of the tokenizer, which may know more or fewer ids than the model.
        """
        self._vocab_size = vocab_size
        self._tokenizer = _tokenizer(model_dir / "tokenizer.json", max(vocab_size, num_token_ids), eos_token_ids)
        # Of a model that names no eos the library knows one by its text, and allows it where a guide ends.
        known = self._tokenizer.eos_tokens if self._tokenizer else ()
        self.end_ids = eos_token_ids or tuple(token for token in known if token < vocab_size)
        self._limits = llguidance.LLParserLimits(step_max_items=MAX_STEP_ITEMS, verbose_errors=False)

    def make(self, kind: str, text: str, outputs: Iterable[TokenIds]) -> list[Guide]:
        """A guide for each output, standing after it. Raises RequestRefused where the text is no such grammar.

        Most of the time is spent without the GIL, the first mask included, which is the dearest.
        """
        if self._tokenizer is None:
            raise RequestRefused("guided decoding needs the model's tokenizer.json")
        try:
            grammar = _grammar(llguidance.LLMatcher, kind, text)
        except ValueError as error:
            raise RequestRefused(f"guide: {error}") from error
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestRefused(f"guide: {matcher.get_error()}")
        return [self._after(output, Guide(matcher.deep_copy(), self._vocab_size)) for output in outputs]

    def _after(self, output: TokenIds, guide: Guide) -> Guide:
        try:
            for token in output.tolist():
                guide.accept(token)
        except GuideFailed as error:
            raise RequestRefused(f"guide: the output so far does not follow it: {error}") from error
        return guide


def _tokenizer(path: Path, num_ids: int, eos_token_ids: tuple[int, ...]) -> Any:
    """llguidance's view of a tokenizer.json; None where it has none or cannot read it."""
    if not path.is_file():
        return None
    try:
        return llguidance.LLTokenizer(str(path), n_vocab=num_ids, eos_token=list(eos_token_ids) or None)
    except Exception as error:  # the library raises whatever its parsers raise
        log.warning("no guided decoding with this tokenizer file=%s error=%s", path, error)
        return None


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
