"""The reference: the `tokenizers` library. Tokenizer worker; the only module of this package that imports it."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from tokservice.tokenizer.backends import AddedToken, TokenIds
from tokservice.wire.errors import StartupError

_FLAGS = tuple(field.name for field in dataclasses.fields(AddedToken))


class HuggingFaceBackend:
    """See Backend."""

    name = "hf"

    def __init__(self, path: Path) -> None:
        """Load a tokenizer.json. Raises StartupError."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise StartupError(f"cannot read {path}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool, special_as_text: bool = False) -> TokenIds:
        """See Backend. ``encode_batch_fast`` releases the GIL, ``encode`` would hold it."""
        if self._tokenizer.encode_special_tokens != special_as_text:  # a setting, not an argument, in this library
            self._tokenizer.encode_special_tokens = special_as_text
        return array("I", self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """See Backend."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def token(self, token_id: int) -> str | None:
        """See Backend."""
        return self._tokenizer.id_to_token(token_id)

    def added_tokens(self) -> dict[int, AddedToken]:
        """See Backend."""
        tokens = self._tokenizer.get_added_tokens_decoder().items()
        return {token_id: AddedToken(**{flag: getattr(token, flag) for flag in _FLAGS}) for token_id, token in tokens}

    def add_tokens(self, tokens: Sequence[AddedToken]) -> list[int]:
        """See Backend."""
        for token in tokens:
            added = tokenizers.AddedToken(**dataclasses.asdict(token))
            add = self._tokenizer.add_special_tokens if token.special else self._tokenizer.add_tokens
            add([added])
        ids = [self._tokenizer.token_to_id(token.content) for token in tokens]
        return [token_id for token_id in ids if token_id is not None]

    def forget(self) -> None:
        """See Backend. The library remembers at most 10,000 short words."""
