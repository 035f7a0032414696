"""The bodies of ``/v1/messages`` (Anthropic's Messages API), as strict msgspec types.

Used by the tokenizer workers; the rules of ``requests.py`` hold here too. Hints about caching are the client's
bookkeeping: the engine's prefix cache needs none. Of a few fields that coding agents always send, API.md says what has
no effect: the edits of the context and, where the model knows nothing of it, thinking and effort.
"""

from __future__ import annotations

import typing
from typing import Annotated, Any

import msgspec
from msgspec import Raw

from tokservice.protocol.bounds import Bounds
from tokservice.protocol.reading import (
    NULL,
    Ignored,
    Neutral,
    Refused,
    RefusedUnlessEmpty,
    RefusedUnlessFalse,
    neutral_fields,
)
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


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking", forbid_unknown_fields=True):
    """Thoughts of another server's model, encrypted for that server alone: they are left out."""

    data: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    """An earlier tool call of the assistant."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: Ignored = NULL
    caller: Annotated[Raw, Neutral({"type": "direct"})] = NULL
    toolset_name: Refused = NULL


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", forbid_unknown_fields=True):
    """What came of a tool call; what failed is introduced to the model as an error."""

    tool_use_id: str
    content: str | list[OnlyText] | None = None
    is_error: bool | None = None
    cache_control: Ignored = NULL
    toolset_name: Refused = NULL


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation. The answer continues a last one of the assistant; "system" holds text alone."""

    role: typing.Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock]


class InputTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool of the client; there are no tools of the server. ``strict``: see ``tools.Function``."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: typing.Literal["custom"] | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    eager_input_streaming: bool | None = None  # the input is always streamed as it comes
    cache_control: Ignored = NULL
    defer_loading: RefusedUnlessFalse = NULL  # of tools that a search on the server brings in
    allowed_callers: Annotated[Raw, Neutral(["direct"])] = NULL


class InputToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """Whether tools are called: "any" demands a call, "tool" one of the tool that is named."""

    type: typing.Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


# --- thinking, output, context --------------------------------------------------------------------------------

Display = typing.Literal["summarized", "omitted"]


class AdaptiveThinking(msgspec.Struct, tag_field="type", tag="adaptive", forbid_unknown_fields=True):
    """The model thinks as it sees fit. Thoughts are shown as they are, or left out of the answer."""

    display: Display | None = None


class EnabledThinking(msgspec.Struct, tag_field="type", tag="enabled", forbid_unknown_fields=True):
    """The same: nothing ends the thoughts at their budget, ``max_tokens`` bounds them with the rest."""

    budget_tokens: Annotated[int, Bounds(1024)]
    display: Display | None = None


class DisabledThinking(msgspec.Struct, tag_field="type", tag="disabled", forbid_unknown_fields=True):
    """The model does not think, if its chat template can keep it from it."""


class JsonOutput(msgspec.Struct, forbid_unknown_fields=True):
    """The text of the answer is JSON that follows a schema."""

    type: typing.Literal["json_schema"]
    schema: Raw


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """``output_config``; the effort goes to the chat template, if it reads one."""

    effort: typing.Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None
    task_budget: Refused = NULL


class ClearThinking(msgspec.Struct, tag_field="type", tag="clear_thinking_20251015", forbid_unknown_fields=True):
    """Lets the server forget earlier thoughts; it does not: what of them is shown is the chat template's to say."""

    keep: Ignored = NULL


class ClearToolUses(msgspec.Struct, tag_field="type", tag="clear_tool_uses_20250919", forbid_unknown_fields=True):
    """Lets the server forget results of tools; it does not."""

    trigger: Ignored = NULL
    keep: Ignored = NULL
    clear_at_least: Ignored = NULL
    clear_tool_inputs: Ignored = NULL
    exclude_tools: Ignored = NULL


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    """``context_management``: leave to shorten the conversation, of which no use is made."""

    edits: list[ClearThinking | ClearToolUses] | None = None


# --- the bodies -----------------------------------------------------------------------------------------------


class CountTokensBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/messages/count_tokens``"""

    model: str
    messages: list[InputMessage]
    system: str | list[OnlyText] | None = None
    tools: list[InputTool] | None = None
    tool_choice: InputToolChoice | None = None
    cache_control: Ignored = NULL

    thinking: AdaptiveThinking | EnabledThinking | DisabledThinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = None  # the older name of output_config.format
    context_management: ContextManagement | None = None

    mcp_servers: RefusedUnlessEmpty = NULL
    compaction: Refused = NULL
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
    diagnostics: Refused = NULL
    fallbacks: RefusedUnlessEmpty = NULL


TEXT_NEUTRAL = neutral_fields(OnlyText)
TOOL_USE_NEUTRAL = neutral_fields(ToolUseBlock)
TOOL_RESULT_NEUTRAL = neutral_fields(ToolResultBlock)
TOOL_NEUTRAL = neutral_fields(InputTool)
OUTPUT_CONFIG_NEUTRAL = neutral_fields(OutputConfig)
