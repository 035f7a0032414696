"""What clients of ``/v1/messages`` read, as types: see ``answers.py``."""

from __future__ import annotations

import typing
from typing import Any

from msgspec import UNSET, UnsetType

from tokservice.protocol.answers import Answer


class TextContent(Answer, tag_field="type", tag="text"):
    """A text."""

    text: str


class ThinkingContent(Answer, tag_field="type", tag="thinking"):
    """Thoughts of the model. The signature is but a name: clients send no thoughts back that have none."""

    thinking: str
    signature: str


class ToolUseContent(Answer, tag_field="type", tag="tool_use"):
    """A tool call. In a stream the input comes as deltas."""

    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent
StopReason = typing.Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class ThinkingTokens(Answer):
    """``output_tokens_details``"""

    thinking_tokens: int


class FinalUsage(Answer):
    """Numbers of tokens; those read from the cache do not count as input."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageUsage(FinalUsage):
    """The same, with the only tier that there is."""

    service_tier: typing.Literal["standard"]


class AppliedEdits(Answer):
    """``context_management``, where it was asked for: nothing of the conversation is cleared."""

    applied_edits: list[str]


class AnsweredMessage(Answer, tag_field="type", tag="message"):
    """The model's message. Where it begins a stream it is still empty."""

    id: str
    role: typing.Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    context_management: AppliedEdits | UnsetType = UNSET


class OriginalTokens(Answer):
    """``context_management``, where it was asked for: the same number, as nothing is cleared."""

    original_input_tokens: int


class TokenCount(Answer):
    """The body of ``/v1/messages/count_tokens``."""

    input_tokens: int
    context_management: OriginalTokens | UnsetType = UNSET


# --- events ---------------------------------------------------------------------------------------------------


class MessageStart(Answer, tag_field="type", tag="message_start"):
    """The first event."""

    message: AnsweredMessage


class Ping(Answer, tag_field="type", tag="ping"):
    """Says nothing."""


class ContentBlockStart(Answer, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: Content


class TextDelta(Answer, tag_field="type", tag="text_delta"):
    """More of a text."""

    text: str


class ThinkingDelta(Answer, tag_field="type", tag="thinking_delta"):
    """More of the thoughts."""

    thinking: str


class SignatureDelta(Answer, tag_field="type", tag="signature_delta"):
    """The end of the thoughts."""

    signature: str


class InputJsonDelta(Answer, tag_field="type", tag="input_json_delta"):
    """More of the JSON text of a tool's input."""

    partial_json: str


class ContentBlockDelta(Answer, tag_field="type", tag="content_block_delta"):
    """A block grows."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(Answer, tag_field="type", tag="content_block_stop"):
    """A block is complete."""

    index: int


class MessageEnd(Answer):
    """Why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class EndedMessage(Answer, tag_field="type", tag="message_delta"):
    """All blocks are complete; the usage is that of the whole message."""

    delta: MessageEnd
    usage: FinalUsage
    context_management: AppliedEdits | UnsetType = UNSET


class MessageStop(Answer, tag_field="type", tag="message_stop"):
    """The last event."""


class MessageErrorDetail(Answer):
    """What went wrong."""

    type: str
    message: str


class MessageError(Answer, tag_field="type", tag="error"):
    """Every error of these paths; also the last event of a stream that failed."""

    error: MessageErrorDetail


EVENTS = (
    MessageStart,
    Ping,
    ContentBlockStart,
    ContentBlockDelta,
    ContentBlockStop,
    EndedMessage,
    MessageStop,
    MessageError,
)
