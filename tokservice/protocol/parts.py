"""What a response says, before any route gives it a form. Used by the detokenizer workers.

A ``Piece`` is what one event of a stream adds to a choice, or, merged, all that a plain response says about it.
The formats (``responses.py`` and its neighbours) turn pieces into bytes; nothing else knows what clients read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from tokservice.wire.messages import FinishReason


class Kind(IntEnum):
    """What a part of an answer is."""

    CONTENT = 0
    REASONING = 1  # the model thinks aloud
    CALL = 2  # a tool call begins; the text is the tool's name
    ARGUMENTS = 3  # more of the JSON text of its arguments
    CUSTOM_CALL = 4  # a call of a custom tool begins; the text is the tool's name
    INPUT = 5  # more of the text that is its input


CALLS = (Kind.CALL, Kind.CUSTOM_CALL)


class Part(NamedTuple):
    """A stretch of an answer."""

    kind: Kind
    text: str
    call: int = 0  # of calls and what they hold: the number of the tool call, from 0


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


@dataclass(frozen=True, slots=True)
class PromptReport:
    """What the first piece of a choice says about its prompt."""

    token_ids: Sequence[int] | None = None  # where asked for
    text: str = ""  # to echo
    entries: Sequence[TokenEntry] = ()  # to echo with logprobs
    scores: Sequence[TokenEntry] | None = None  # prompt_logprobs, the first token included


class Usage(NamedTuple):
    """Numbers of tokens; the cached ones are among those of the prompt, those of the thoughts among the output."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int = 0  # all up to the end of the thoughts


@dataclass(slots=True)
class Piece:
    """What one event, or a whole plain response, says about a choice."""

    parts: list[Part] = field(default_factory=list)
    tokens: list[TokenEntry] = field(default_factory=list)  # of this piece, where ids or logprobs are asked for
    prompt: PromptReport | None = None  # in the first piece
    finish: FinishReason = FinishReason.RUNNING
    calls_tools: bool = False  # a tool call has begun, in this piece or before
    stop_string: str = ""  # that ended the choice

    @property
    def text(self) -> str:
        """The content, joined."""
        return "".join(part.text for part in self.parts if part.kind == Kind.CONTENT)


def merged(pieces: Iterable[Piece]) -> Piece:
    """All pieces of a choice as one."""
    whole = Piece()
    for piece in pieces:
        whole.parts += piece.parts
        whole.tokens += piece.tokens
        whole.prompt = whole.prompt or piece.prompt
        whole.finish = piece.finish or whole.finish
        whole.calls_tools = piece.calls_tools
        whole.stop_string = piece.stop_string
    return whole
