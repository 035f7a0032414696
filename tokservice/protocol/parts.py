"""What a response says, before any route gives it a form. Used by the detokenizer workers.

A ``Piece`` is what one event of a stream adds to a choice, a ``Whole`` what a plain response says about one.
The formats (``responses.py`` and its neighbours) turn pieces into bytes; nothing else knows what clients read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import orjson

from tokservice.protocol.growing_json import JsonList, JsonString
from tokservice.protocol.logprobs import Logprobs
from tokservice.protocol.token_entry import TokenEntry
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


@dataclass(frozen=True, slots=True)
class PromptReport:
    """What the first piece of a choice says about its prompt, written already."""

    text: JsonString | None = None  # to echo
    num_chars: int = 0  # of it
    logprobs: Logprobs | None = None  # to echo
    token_ids: JsonList | None = None  # where asked for
    scores: Logprobs | None = None  # prompt_logprobs, the first token included


class Usage(NamedTuple):
    """Numbers of tokens; the cached ones are among those of the prompt, those of the thoughts among the output."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int = 0  # all up to the end of the thoughts


@dataclass(slots=True)
class Piece:
    """What one event says about a choice."""

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


class Passage(NamedTuple):
    """Parts of a kind that follow each other, written as one JSON string."""

    kind: Kind
    call: int  # see Part
    text: JsonString

    @property
    def part(self) -> Part:
        """All of it as one part."""
        return Part(self.kind, orjson.loads(b"".join(self.text)), self.call)


class Whole:
    """What the pieces of a choice add up to, apart from its tokens. The pieces are not kept: each token would cost
    several objects, among which the process would have to look for garbage."""

    def __init__(self) -> None:
        self.passages: list[Passage] = []
        self.prompt: PromptReport | None = None
        self.finish = FinishReason.RUNNING
        self.calls_tools = False
        self.stop_string = ""

    def add(self, piece: Piece) -> int:
        """The next piece; returns the bytes that it takes."""
        num_bytes = 0
        for kind, text, call in piece.parts:
            if kind in CALLS or not self.passages or self.passages[-1][:2] != (kind, call):
                self.passages.append(Passage(kind, call, JsonString()))
            num_bytes += len(self.passages[-1].text.add(text))
        self.prompt = self.prompt or piece.prompt
        self.finish = piece.finish or self.finish
        self.calls_tools = piece.calls_tools
        self.stop_string = piece.stop_string
        return num_bytes
