"""The bodies of ``/v1/messages`` (Anthropic's Messages API), as strict msgspec types.

Used by the tokenizer workers; the rules of ``requests.py`` hold here too. Hints about caching are the client's
bookkeeping: the engine's prefix cache needs none.
"""

from __future__ import annotations

import typing
from typing import Annotated, Any

import msgspec
from msgspec import Raw

from tokservice.protocol.bounds import Bounds
from tokservice.protocol.reading import NULL, Ignored, Neutral, Refused, RefusedUnlessEmpty, neutral_fields
from tokservice.protocol.requests import Temperature, TopP


class TextBlock(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A text; the texts of a message are joined."""

    text: str
    cache_control: Ignored = NULL
    citations: RefusedUnlessEmpty = NULL


class OnlyText(msgspec.Struct, forbid_unknown_fields=True):
    """The same where nothing else can be; its type may be left out."""

    text: str
    type: typing.Literal["text"] = "text"
    cache_control: Ignored = NULL
    citations: RefusedUnlessEmpty = NULL


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    """Earlier thoughts of the assistant. Nobody signs them here."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    """An earlier tool call of the assistant."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: Ignored = NULL


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", forbid_unknown_fields=True):
    """What came of a tool call; what failed is introduced to the model as an error."""

    tool_use_id: str
    content: str | list[OnlyText] | None = None
    is_error: bool | None = None
    cache_control: Ignored = NULL


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation. The answer continues a last one of the assistant; "system" holds text alone."""

    role: typing.Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]


class InputTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool of the client; there are no tools of the server."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: typing.Literal["custom"] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # the input is always streamed as it comes
    cache_control: Ignored = NULL


class InputToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """Whether tools are called: "any" demands a call, "tool" one of the tool that is named."""

    type: typing.Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountTokensBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/messages/count_tokens``"""

    model: str
    messages: list[InputMessage]
    system: str | list[OnlyText] | None = None
    tools: list[InputTool] | None = None
    tool_choice: InputToolChoice | None = None
    cache_control: Ignored = NULL

    thinking: Annotated[Raw, Neutral({"type": "disabled"})] = NULL  # the model decides
    output_config: RefusedUnlessEmpty = NULL
    output_format: Refused = NULL
    context_management: Refused = NULL
    mcp_servers: RefusedUnlessEmpty = NULL
    speed: Annotated[Raw, Neutral("standard")] = NULL


class MessagesBody(CountTokensBody, kw_only=True):
    """``POST /v1/messages``"""

    max_tokens: Annotated[int, Bounds(1)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: int | None = None

    metadata: Ignored = NULL
    service_tier: Ignored = NULL
    container: Refused = NULL
    inference_geo: Refused = NULL


TEXT_NEUTRAL = neutral_fields(OnlyText)
