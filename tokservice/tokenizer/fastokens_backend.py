"""The fast back end: the `fastokens` library. Tokenizer worker; the only module that imports it."""

from __future__ import annotations

import dataclasses
import os
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path

from tokservice.tokenizer.backends import AddedToken, TokenIds

# Before the import, which reads it. The pool of workers is the parallelism: threads of the library's own would compete
# with the HTTP loop, spinning while they wait.
os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")

import fastokens

_FLAGS = tuple(field.name for field in dataclasses.fields(AddedToken))
_BIG_ENDIAN = sys.byteorder == "big"


class FastokensBackend:
    """See Backend."""

    name = "fastokens"

    def __init__(self, path: Path) -> None:
        """Load a tokenizer.json. The library raises exceptions of many kinds for what it does not support."""
        self._path = path
        self._added: list[AddedToken] = []
        self._load()

    def encode(self, text: str, *, add_special_tokens: bool, special_as_text: bool = False) -> TokenIds:
        """See Backend."""
        packed, _ = self._tokenizer.encode_batch_flat([text], add_special_tokens, special_as_text)
        token_ids = array("I", packed)
        if _BIG_ENDIAN:
            token_ids.byteswap()
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """See Backend."""
        text: str = self._tokenizer.decode(list(token_ids), False)
        return text

    def token(self, token_id: int) -> str | None:
        """See Backend."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def added_tokens(self) -> dict[int, AddedToken]:
        """See Backend."""
        tokens = self._tokenizer.added_tokens()
        return {token["id"]: AddedToken(**{flag: token[flag] for flag in _FLAGS}) for token in tokens}

    def add_tokens(self, tokens: Sequence[AddedToken]) -> list[int]:
        """See Backend."""
        self._added += tokens
        self._tokenizer.add_tokens(list(tokens))
        ids = [self._tokenizer.token_to_id(token.content) for token in tokens]
        return [token_id for token_id in ids if token_id is not None]

    def forget(self) -> None:
        """See Backend. The library has no call for it, so this takes as long as loading."""
        del self._tokenizer
        self._load()
        self._tokenizer.add_tokens(self._added)
        self.encode("a b", add_special_tokens=False)  # what one thread remembers goes when it meets the new one

    def _load(self) -> None:
        self._tokenizer = fastokens.Tokenizer.from_file(str(self._path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
