"""The narrow seam over the library that encodes: text in, token ids out. Tokenizer worker.

The only module that imports ``tokenizers``. Ids equal those of ``Tokenizer.encode`` on the whole text, always.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from tokservice.wire.errors import StartupError


class Backend(Protocol):
    """What the rest of the worker asks of a tokenizer. One thread uses it; nothing is ever changed on it."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it; None for an id that the tokenizer does not know."""

    @property
    def size(self) -> int:
        """One more than the highest token id."""


class HuggingFaceBackend:
    """The `tokenizers` library."""

    def __init__(self, model_dir: Path) -> None:
        """Load ``tokenizer.json``. Raises StartupError."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise StartupError(f"{path} does not exist: the model's folder needs a tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise StartupError(f"cannot read {path}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """See Backend. ``encode_batch_fast`` releases the GIL, ``encode`` would hold it."""
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """See Backend."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def token(self, token_id: int) -> str | None:
        """See Backend."""
        return self._tokenizer.id_to_token(token_id)

    @property
    def size(self) -> int:
        """See Backend."""
        return self._size
