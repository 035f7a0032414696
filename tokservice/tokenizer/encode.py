"""Text to token ids for one model, with the checks that belong to its tokenizer. Tokenizer worker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokservice.runtime.config import TokenizerConfig
from tokservice.tokenizer.backends import Backend, HuggingFaceBackend
from tokservice.tokenizer.length_guard import max_chars_per_token
from tokservice.tokenizer.model_files import read_json
from tokservice.tokenizer.prompts import check_token_ids, too_long
from tokservice.wire.errors import RequestError, StartupError
from tokservice.wire.messages import EngineLimits


class Encoder:
    """The tokenizer of one model; used by one thread."""

    def __init__(self, model_dir: Path, settings: TokenizerConfig) -> None:
        """Load ``tokenizer.json``. Raises StartupError."""
        if not settings.allow_special_in_content:
            raise StartupError("tokenizer.allow_special_in_content = false is not supported yet")
        self._backend: Backend = HuggingFaceBackend(model_dir)
        tokenizer = read_json(model_dir / "tokenizer.json")
        self._special_ids = {token["id"] for token in tokenizer.get("added_tokens") or () if token["special"]}
        self._chars_per_token = max_chars_per_token(tokenizer)

    def encode(
        self, text: str, *, add_special_tokens: bool, limits: EngineLimits, param: str, guarded: bool = False
    ) -> list[int]:
        """Token ids of a text. Raises RequestError (400), which names ``param``.

        ``guarded``: a text that certainly has more tokens than the context is refused without being encoded.
        """
        if guarded and self._chars_per_token and len(text) > limits.max_model_len * self._chars_per_token:
            raise too_long(f"{len(text)} characters, which cannot fit", limits.max_model_len, param)
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # the library raises plain Exception
            message = f"The tokenizer cannot encode this text: {error}"
            raise RequestError(message[:500], param=param, code="invalid_value") from error
        if self._backend.size > limits.vocab_size:  # it knows tokens that the model does not have
            check_token_ids(param, ids, limits.vocab_size)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return self._backend.decode(token_ids)

    def token_strings(self, token_ids: Sequence[int]) -> list[str | None]:
        """The tokens as the vocabulary writes them."""
        return list(map(self._backend.token, token_ids))

    def is_bare(self, token_ids: Sequence[int]) -> bool:
        """Whether the tokens hold no text at all: special ones alone."""
        return self._special_ids.issuperset(token_ids)
