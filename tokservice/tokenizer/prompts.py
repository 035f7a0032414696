"""The prompts of a request as lists of token ids, and whether they fit. Tokenizer worker; pure."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from tokservice.wire.errors import RequestError

Prompt = str | list[int]

_BIG_ENDIAN = sys.byteorder == "big"


def prompt_list(prompt: str | Sequence[int | str | list[int]], param: str) -> list[Prompt]:
    """The four forms of a prompt (text, texts, ids, lists of ids) as a list. Raises RequestError (400)."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [list(prompt)]  # type: ignore[arg-type]
    if kinds in ({str}, {list}):
        return list(prompt)  # type: ignore[arg-type]
    if not kinds:
        raise empty(param)
    message = f"'{param}' must not mix texts, token ids and lists of token ids."
    raise RequestError(message, param=param, code="invalid_value")


def num_tokens_to_keep(asked: int | None, max_tokens: int, max_model_len: int) -> int | None:
    """What ``truncate_prompt_tokens`` asks for; -1: as many as leave room for ``max_tokens``; None: all.

    Raises RequestError (400).
    """
    if asked is None or asked >= 1:
        return asked
    if asked == -1:
        return max(1, max_model_len - max_tokens)
    message = "'truncate_prompt_tokens' must be at least 1, or -1 for as many as fit, not 0."
    raise RequestError(message, param="truncate_prompt_tokens", code="invalid_value")


def check_length(token_ids: Sequence[int], max_model_len: int, param: str) -> None:
    """Raise RequestError (400) unless there is at least one token, and room for one more."""
    if not token_ids:
        raise empty(param)
    if len(token_ids) >= max_model_len:
        raise too_long(f"{len(token_ids)} tokens", max_model_len, param)


def check_token_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError (400) unless all ids are in 0 .. vocab_size-1."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        message = f"Invalid '{param}': token ids must be between 0 and {vocab_size - 1}, not {wrong!s:.40}."
        raise RequestError(message, param=param, code="invalid_value")


def empty(param: str = "prompt") -> RequestError:
    """A prompt without any token."""
    return RequestError(f"'{param}' is empty: it must hold at least one token.", param=param, code="empty_prompt")


def too_long(length: str, max_model_len: int, param: str) -> RequestError:
    """A prompt that leaves no room for an answer."""
    message = (
        f"This model's maximum context length is {max_model_len} tokens, prompt and answer together; "
        f"your prompt has {length}."
    )
    return RequestError(message, param=param, code="context_length_exceeded")


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    packed = token_ids if isinstance(token_ids, array) else array("I", token_ids)
    if _BIG_ENDIAN:
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()
