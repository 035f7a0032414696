"""The narrow seam over the libraries that encode: text in, token ids out. Tokenizer worker.

Each library has one file, which alone imports it: ``hf_backend`` for ``tokenizers``, the reference, and
``fastokens_backend`` for ``fastokens``. Ids equal those of ``Tokenizer.encode`` of the reference on the whole text,
always. Which of the two runs is decided in ``backend_choice``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from array import array

TokenIds: TypeAlias = "array[int]"  # of type code I: unsigned, 32 bits


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is looked for in the text before anything else is done to it. Flags as in tokenizer.json."""

    content: str
    special: bool
    normalized: bool = False  # looked for in the normalized text
    lstrip: bool = False  # takes the blanks on its left with it
    rstrip: bool = False
    single_word: bool = False


class Backend(Protocol):
    """What the rest of the worker asks of a library. One thread uses it."""

    name: str  # as in tokenizer.backend

    def encode(self, text: str, *, add_special_tokens: bool, special_as_text: bool = False) -> TokenIds:
        """Token ids of a text. ``special_as_text``: what looks like a special token is text like any other."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it; None for an id that the tokenizer does not know."""

    def added_tokens(self) -> dict[int, AddedToken]:
        """By id."""

    def add_tokens(self, tokens: Sequence[AddedToken]) -> list[int]:
        """Add tokens, or change the flag ``special`` of present ones; their ids. At start-up alone."""

    def forget(self) -> None:
        """Drop what was remembered of earlier texts."""
