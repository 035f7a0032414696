"""Text to token ids for one model, with the checks that belong to its tokenizer. Tokenizer worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from tokservice.runtime.config import TokenizerConfig
from tokservice.runtime.memory import resident_bytes
from tokservice.tokenizer import backend_choice
from tokservice.tokenizer.backends import Backend, TokenIds
from tokservice.tokenizer.cache_bound import CacheBound
from tokservice.tokenizer.own_tokens import OwnTokens, Rendered
from tokservice.tokenizer.prompts import check_token_ids, too_long
from tokservice.tokenizer.shadow import ShadowCheck
from tokservice.wire.errors import RequestError
from tokservice.wire.messages import EngineLimits

log = logging.getLogger(__name__)


class Encoder:
    """The tokenizer of one model; used by one thread."""

    def __init__(self, model_dir: Path, settings: TokenizerConfig, randbits: Callable[[int], int]) -> None:
        """Load ``tokenizer.json``. ``randbits(k)``: a random integer below 2**k. Raises StartupError."""
        choice = backend_choice.choose(model_dir, settings.backend)
        self._path = model_dir / "tokenizer.json"
        self._backend = choice.backend
        self._reference = self._backend if self._backend.name == "hf" else None  # loaded when a text needs it
        added = self._backend.added_tokens()
        self._size = max(choice.known.size, 1 + max(added, default=-1))
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._chars_per_token = choice.known.max_chars_per_token
        self.shadow_check: ShadowCheck | None = None
        if settings.shadow_check_rate > 0 and self._reference is None:
            self.shadow_check = ShadowCheck(self._load_reference, settings.shadow_check_rate, randbits)
        self.cache_bound = CacheBound(self._backend, resident_bytes)
        self.own_tokens = None if settings.allow_special_in_content else OwnTokens(self._backend, choice.known.unk_id)

    def encode(
        self, text: str, *, add_special_tokens: bool, limits: EngineLimits, param: str, guarded: bool = False
    ) -> TokenIds:
        """Token ids of a text. Raises RequestError (400), which names ``param``.

        ``guarded``: a text that certainly has more tokens than the context is refused without being encoded.
        """
        if guarded and self._chars_per_token and len(text) > limits.max_model_len * self._chars_per_token:
            raise too_long(f"{len(text)} characters, which cannot fit", limits.max_model_len, param)
        source, special_as_text = (text.marked, True) if isinstance(text, Rendered) else (text, False)
        try:
            ids = self._encode(source, add_special_tokens, special_as_text)
            if self.shadow_check:
                self.shadow_check.note(source, add_special_tokens, special_as_text, ids)
            if self.own_tokens and special_as_text:
                ids = self.own_tokens.restored(ids, add_special_tokens=add_special_tokens)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # plain Exception in one library; a panic in Rust code is not even that
            message = f"The tokenizer cannot encode this text: {error}"
            raise RequestError(message[:500], param=param, code="invalid_value") from error
        if self._size > limits.vocab_size:  # it knows tokens that the model does not have
            check_token_ids(param, ids, limits.vocab_size)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return self._backend.decode([token_id for token_id in token_ids if token_id < self._size])

    def token_strings(self, token_ids: Sequence[int]) -> list[str | None]:
        """The tokens as the vocabulary writes them."""
        return [self._backend.token(token_id) if token_id < self._size else None for token_id in token_ids]

    def added_id(self, text: str) -> int | None:
        """The id of an added token; None: no added token has this text."""
        return self._added_ids.get(text)

    def is_bare(self, token_ids: Sequence[int]) -> bool:
        """Whether the tokens hold no text at all: special ones alone."""
        return self._special_ids.issuperset(token_ids)

    def _encode(self, text: str, add_special_tokens: bool, special_as_text: bool) -> TokenIds:
        """By the reference where the fast library gives up, as it does on a run of 300,000 blanks."""
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens, special_as_text=special_as_text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            if self._reference is self._backend:
                raise
            kind = type(error).__name__  # its text may hold some of the prompt
            log.warning("%s failed, the reference encodes error=%s num_chars=%d", self._backend.name, kind, len(text))
        reference = self._load_reference()
        return reference.encode(text, add_special_tokens=add_special_tokens, special_as_text=special_as_text)

    def _load_reference(self) -> Backend:
        if self._reference is None:
            self._reference = backend_choice.load_reference(self._path)
            if self.own_tokens:
                self.own_tokens.teach(self._reference)
        return self._reference
