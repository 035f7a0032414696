"""The body of ``/v1/responses`` (OpenAI's Responses API), as strict msgspec types.

Used by the tokenizer workers; the rules of ``requests.py`` hold here too. Nothing is stored, and there are no tools of
the server: what asks for either is refused. Ids of items, and how an item ended, are the client's bookkeeping.
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
    Reader,
    Refused,
    RefusedUnlessEmpty,
    RefusedUnlessFalse,
    neutral_fields,
)
from tokservice.protocol.requests import (
    CommonSampling,
    Effort,
    NumLogprobs,
    Priority,
    PromptCacheOptions,
    PromptCacheRetention,
)
from tokservice.protocol.tools import AnyText, Grammar

DirectCaller = Annotated[Raw, Neutral({"type": "direct"})]
ItemStatus = typing.Literal["in_progress", "completed", "incomplete"]

# --- items of the input ---------------------------------------------------------------------------------------


class InputText(msgspec.Struct, tag_field="type", tag="input_text", forbid_unknown_fields=True):
    """A text; the texts of a message are joined."""

    text: str
    prompt_cache_breakpoint: Ignored = NULL


class PriorOutputText(msgspec.Struct, tag_field="type", tag="output_text", forbid_unknown_fields=True):
    """A text of an earlier answer."""

    text: str
    annotations: RefusedUnlessEmpty = NULL
    logprobs: Ignored = NULL


class MessageItem(msgspec.Struct, tag_field="type", tag="message", forbid_unknown_fields=True):
    """A message; its type may be left out. The answer continues a last one of the assistant that is not completed."""

    role: typing.Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | PriorOutputText]
    id: str | None = None
    status: ItemStatus | None = None
    phase: Refused = NULL


class CallItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What all earlier calls of tools have."""

    call_id: str
    name: str
    id: str | None = None
    status: ItemStatus | None = None
    caller: DirectCaller = NULL
    namespace: str | None = None
    async_: bool | None = msgspec.field(default=None, name="async")  # where its result stands says the same


class FunctionCallItem(CallItem, kw_only=True, tag_field="type", tag="function_call"):
    """An earlier tool call of the assistant; the arguments are JSON in a text."""

    arguments: str


class CustomToolCallItem(CallItem, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """An earlier call of a custom tool."""

    input: str


class ResultText(msgspec.Struct, forbid_unknown_fields=True):
    """A text of what came of a tool call; its type may be left out, as of all that are alone in their place."""

    text: str
    type: typing.Literal["input_text"] = "input_text"
    prompt_cache_breakpoint: Ignored = NULL


class FunctionCallOutputItem(msgspec.Struct, tag_field="type", tag="function_call_output", forbid_unknown_fields=True):
    """What came of a tool call."""

    call_id: str
    output: str | list[ResultText]
    id: str | None = None
    status: ItemStatus | None = None
    name: str | None = None  # the call has it too, and the next
    namespace: str | None = None
    caller: DirectCaller = NULL


class CustomToolCallOutputItem(FunctionCallOutputItem, tag="custom_tool_call_output"):
    """What came of a call of a custom tool."""


class SummaryText(msgspec.Struct, forbid_unknown_fields=True):
    """A summary of thoughts."""

    text: str
    type: typing.Literal["summary_text"] = "summary_text"


class ReasoningText(msgspec.Struct, forbid_unknown_fields=True):
    """Thoughts."""

    text: str
    type: typing.Literal["reasoning_text"] = "reasoning_text"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", forbid_unknown_fields=True):
    """Earlier thoughts of the assistant; their summary counts where they are not there themselves."""

    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    id: str | None = None
    status: ItemStatus | None = None
    encrypted_content: Refused = NULL


class TypeOfItem(msgspec.Struct):
    """What of an item says how to read the rest."""

    type: str | None = None


Item = (
    MessageItem
    | FunctionCallItem
    | FunctionCallOutputItem
    | CustomToolCallItem
    | CustomToolCallOutputItem
    | ReasoningItem
)
ITEM_READERS: dict[str, Reader[Any]] = {kind.__struct_config__.tag: Reader(kind) for kind in typing.get_args(Item)}
TYPE_READER = Reader(TypeOfItem)

# --- other parts ----------------------------------------------------------------------------------------------


class FunctionTool(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A function that the model may call: see ``tools.Function``."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: RefusedUnlessFalse = NULL
    async_: RefusedUnlessFalse = msgspec.field(default=NULL, name="async")  # the model would go on without the result
    allowed_callers: Annotated[Raw, Neutral(["direct"])] = NULL
    output_schema: Refused = NULL


class GrammarText(Grammar, tag_field="type", tag="grammar"):
    """The input of a custom tool follows a grammar."""


class CustomTool(msgspec.Struct, tag_field="type", tag="custom", forbid_unknown_fields=True):
    """A tool whose input is a text: see ``tools.Custom``."""

    name: str
    description: str | None = None
    format: AnyText | GrammarText | None = None
    defer_loading: RefusedUnlessFalse = NULL
    async_: RefusedUnlessFalse = msgspec.field(default=NULL, name="async")
    allowed_callers: Annotated[Raw, Neutral(["direct"])] = NULL


class NamespaceTool(msgspec.Struct, tag_field="type", tag="namespace", forbid_unknown_fields=True):
    """Tools whose names stand for themselves within it alone: see ``tokenizer.namespaces``."""

    name: str
    tools: list[FunctionTool | CustomTool]
    description: str | None = None


class FunctionChoice(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """Names a function."""

    name: str


class CustomChoice(msgspec.Struct, tag_field="type", tag="custom", forbid_unknown_fields=True):
    """Names a custom tool."""

    name: str


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    """The model knows these tools alone; "required" demands a call of one."""

    mode: typing.Literal["auto", "required"]
    tools: list[FunctionChoice | CustomChoice]


ToolChoice = typing.Literal["none", "auto", "required"] | FunctionChoice | CustomChoice | AllowedTools


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """A JSON object."""


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON that follows a schema. ``strict`` false asks for less than what is done anyway."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    """``text``"""

    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Annotated[Raw, Neutral("medium")] = NULL


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True):
    """``reasoning``; the effort goes to the chat template. Thoughts are given as they are, never summarised."""

    effort: Effort | None = None
    summary: Annotated[Raw, Neutral("auto")] = NULL
    generate_summary: Annotated[Raw, Neutral("auto")] = NULL
    context: Annotated[Raw, Neutral("auto")] = NULL
    mode: Annotated[Raw, Neutral("standard")] = NULL


# --- the body -------------------------------------------------------------------------------------------------


class ResponsesBody(CommonSampling, kw_only=True):
    """``POST /v1/responses``"""

    input: str | list[Raw]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Bounds(1)] | None = None
    stream: bool | None = None
    tools: list[FunctionTool | CustomTool | NamespaceTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[typing.Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: NumLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Priority | None = None

    metadata: dict[str, str] | None = None  # bookkeeping of the client, which the answer repeats, as are the next three
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Ignored = NULL
    client_metadata: Ignored = NULL

    store: RefusedUnlessFalse = NULL
    background: RefusedUnlessFalse = NULL
    previous_response_id: Refused = NULL
    conversation: Refused = NULL
    prompt: Refused = NULL
    truncation: Annotated[Raw, Neutral("disabled")] = NULL
    context_management: RefusedUnlessEmpty = NULL
    max_tool_calls: Refused = NULL  # of the server's own tools
    moderation: Refused = NULL
    prompt_cache_options: PromptCacheOptions = NULL
    prompt_cache_retention: PromptCacheRetention = NULL
    access_programs: Annotated[Raw, Neutral({}, {"cyber": "standard"})] = NULL
    background_options: RefusedUnlessEmpty = NULL
    image: Annotated[Raw, Neutral({}, {"context_compression": "auto"}, {"context_compression": "disabled"})] = NULL
    stream_options: Annotated[Raw, Neutral({}, {"include_obfuscation": False})] = NULL


PRIOR_TEXT_NEUTRAL = neutral_fields(PriorOutputText)
TEXT_CONFIG_NEUTRAL = neutral_fields(TextConfig)
REASONING_CONFIG_NEUTRAL = neutral_fields(ReasoningConfig)
FUNCTION_NEUTRAL = neutral_fields(FunctionTool)
CUSTOM_NEUTRAL = neutral_fields(CustomTool)
