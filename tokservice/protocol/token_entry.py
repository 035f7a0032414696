"""What is said about single tokens. Used by the detokenizer workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Alternative(NamedTuple):
    """A token that might have come at some place."""

    token_id: int
    text: str
    data: bytes  # what it would add to the text
    logprob: float


class TokenEntry(NamedTuple):
    """What is said about one token."""

    token_id: int
    text: str = ""  # the token as clients read it
    data: bytes = b""  # what it adds to the text: nothing where it is hidden
    offset: int = 0  # characters before it, in the output
    logprob: float | None = None  # of the first prompt token there is none
    top: Sequence[Alternative] = ()  # the most likely tokens, best first
