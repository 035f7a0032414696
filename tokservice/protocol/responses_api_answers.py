"""What clients of ``/v1/responses`` read, as types: see ``answers.py``."""

from __future__ import annotations

import typing
from typing import Any

from msgspec import UNSET, UnsetType

from tokservice.protocol.answers import Answer, ChatLogprob

ItemState = typing.Literal["in_progress", "completed", "incomplete"]

# --- items ----------------------------------------------------------------------------------------------------


class AnsweredText(Answer, tag_field="type", tag="output_text"):
    """A text, with its tokens where ``include`` asks for them."""

    text: str
    annotations: list[Any]
    logprobs: list[ChatLogprob]


class AnsweredThoughts(Answer, tag_field="type", tag="reasoning_text"):
    """Thoughts of the model."""

    text: str


class AnsweredMessageItem(Answer, tag_field="type", tag="message"):
    """The model's message. Where it is added to a stream it is still empty, as are the other items."""

    id: str
    role: typing.Literal["assistant"]
    content: list[AnsweredText]
    status: ItemState


class AnsweredReasoningItem(Answer, tag_field="type", tag="reasoning"):
    """The model's thoughts; nobody summarises them here."""

    id: str
    summary: list[Any]
    content: list[AnsweredThoughts]
    status: ItemState


class AnsweredCallItem(Answer, tag_field="type", tag="function_call"):
    """A tool call; the arguments are JSON in a text."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemState
    namespace: str | UnsetType = UNSET  # where the tool has one


class AnsweredCustomCallItem(Answer, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool; the input is a text."""

    id: str
    call_id: str
    name: str
    input: str
    status: ItemState
    namespace: str | UnsetType = UNSET  # where the tool has one


AnsweredItem = AnsweredMessageItem | AnsweredReasoningItem | AnsweredCallItem | AnsweredCustomCallItem

# --- the response ---------------------------------------------------------------------------------------------


class InputTokensDetails(Answer):
    """``input_tokens_details``"""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    """``output_tokens_details``; the thoughts' tokens are among those of the output."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Answer):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Answer):
    """Why a response is incomplete."""

    reason: typing.Literal["max_output_tokens"]


class RepeatedReasoning(Answer):
    """``reasoning`` of the request."""

    effort: str | None
    summary: str | None


class RepeatedFormat(Answer):
    """``text.format`` of the request; all but the type belongs to a schema."""

    type: typing.Literal["text", "json_object", "json_schema"]
    name: str | UnsetType = UNSET
    schema: dict[str, Any] | UnsetType = UNSET
    description: str | UnsetType | None = UNSET
    strict: bool | UnsetType | None = UNSET


class RepeatedText(Answer):
    """``text`` of the request."""

    format: RepeatedFormat


class RepeatedTool(Answer, tag_field="type", tag="function"):
    """A tool of the request."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class RepeatedAnyText(Answer, tag_field="type", tag="text"):
    """The input of a custom tool is any text."""


class RepeatedGrammar(Answer, tag_field="type", tag="grammar"):
    """The input of a custom tool follows a grammar."""

    definition: str
    syntax: typing.Literal["lark", "regex"]


class RepeatedCustomTool(Answer, tag_field="type", tag="custom"):
    """A custom tool of the request."""

    name: str
    description: str | None
    format: RepeatedAnyText | RepeatedGrammar | None


class RepeatedNamespace(Answer, tag_field="type", tag="namespace"):
    """A namespace of the request, and its tools."""

    name: str
    tools: list[RepeatedTool | RepeatedCustomTool]
    description: str | None


class RepeatedFunctionChoice(Answer, tag_field="type", tag="function"):
    """A ``tool_choice`` that names a function."""

    name: str


class RepeatedCustomChoice(Answer, tag_field="type", tag="custom"):
    """A ``tool_choice`` that names a custom tool."""

    name: str


class RepeatedAllowedTools(Answer, tag_field="type", tag="allowed_tools"):
    """A ``tool_choice`` that allows some tools."""

    mode: typing.Literal["auto", "required"]
    tools: list[RepeatedFunctionChoice | RepeatedCustomChoice]


RepeatedToolChoice = RepeatedFunctionChoice | RepeatedCustomChoice | RepeatedAllowedTools


class AnsweredResponse(Answer):
    """The response. Where it begins a stream it is still empty. What follows the usage repeats the request."""

    id: str
    object: typing.Literal["response"]
    created_at: int
    status: typing.Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[AnsweredItem]
    usage: ResponseUsage | None
    background: typing.Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: RepeatedReasoning
    safety_identifier: str | None
    service_tier: typing.Literal["default"]
    store: typing.Literal[False]
    temperature: float
    text: RepeatedText
    tool_choice: typing.Literal["none", "auto", "required"] | RepeatedToolChoice
    tools: list[RepeatedTool | RepeatedCustomTool | RepeatedNamespace]
    top_logprobs: int
    top_p: float
    truncation: typing.Literal["disabled"]
    user: str | None


# --- events ---------------------------------------------------------------------------------------------------


class Numbered(Answer):
    """Base of all events: they are numbered from 0."""

    sequence_number: int


class AboutResponse(Numbered, kw_only=True):
    """Base of the events that show the whole response."""

    response: AnsweredResponse


class ResponseCreated(AboutResponse, kw_only=True, tag_field="type", tag="response.created"):
    """The first event."""


class ResponseInProgress(AboutResponse, kw_only=True, tag_field="type", tag="response.in_progress"):
    """The model writes."""


class ResponseCompleted(AboutResponse, kw_only=True, tag_field="type", tag="response.completed"):
    """The last event."""


class ResponseIncomplete(AboutResponse, kw_only=True, tag_field="type", tag="response.incomplete"):
    """The last event, where the output was cut off."""


class ResponseFailed(AboutResponse, kw_only=True, tag_field="type", tag="response.failed"):
    """The last event, where the model failed."""


class AboutItem(Numbered, kw_only=True):
    """Base of the events that show an item."""

    output_index: int
    item: AnsweredItem


class OutputItemAdded(AboutItem, kw_only=True, tag_field="type", tag="response.output_item.added"):
    """An item begins, empty."""


class OutputItemDone(AboutItem, kw_only=True, tag_field="type", tag="response.output_item.done"):
    """An item is complete, or incomplete for good."""


class InsideItem(Numbered, kw_only=True):
    """Base of the events that name an item."""

    output_index: int
    item_id: str


class InsideContent(InsideItem, kw_only=True):
    """Base of the events that name a part of its content."""

    content_index: int


class ContentPartAdded(InsideContent, kw_only=True, tag_field="type", tag="response.content_part.added"):
    """A part of an item begins, empty."""

    part: AnsweredText | AnsweredThoughts


class ContentPartDone(InsideContent, kw_only=True, tag_field="type", tag="response.content_part.done"):
    """A part of an item is complete."""

    part: AnsweredText | AnsweredThoughts


class OutputTextDelta(InsideContent, kw_only=True, tag_field="type", tag="response.output_text.delta"):
    """More of a text."""

    delta: str
    logprobs: list[ChatLogprob]


class OutputTextDone(InsideContent, kw_only=True, tag_field="type", tag="response.output_text.done"):
    """A text is complete."""

    text: str
    logprobs: list[ChatLogprob]


class ReasoningTextDelta(InsideContent, kw_only=True, tag_field="type", tag="response.reasoning_text.delta"):
    """More of the thoughts."""

    delta: str


class ReasoningTextDone(InsideContent, kw_only=True, tag_field="type", tag="response.reasoning_text.done"):
    """The thoughts are complete."""

    text: str


class ArgumentsDelta(InsideItem, kw_only=True, tag_field="type", tag="response.function_call_arguments.delta"):
    """More of the JSON text of a call's arguments."""

    delta: str


class ArgumentsDone(InsideItem, kw_only=True, tag_field="type", tag="response.function_call_arguments.done"):
    """A call's arguments are complete."""

    arguments: str


class InputDelta(InsideItem, kw_only=True, tag_field="type", tag="response.custom_tool_call_input.delta"):
    """More of the text that a custom tool is called with."""

    delta: str


class InputDone(InsideItem, kw_only=True, tag_field="type", tag="response.custom_tool_call_input.done"):
    """The input of a custom tool is complete."""

    input: str


class StreamError(Numbered, kw_only=True, tag_field="type", tag="error"):
    """The last event of a stream that was cut off; its number is above all others."""

    message: str
    param: str | None
    code: str | None


EVENTS = (
    ResponseCreated,
    ResponseInProgress,
    OutputItemAdded,
    ContentPartAdded,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    ContentPartDone,
    ArgumentsDelta,
    ArgumentsDone,
    InputDelta,
    InputDone,
    OutputItemDone,
    ResponseCompleted,
    ResponseIncomplete,
    ResponseFailed,
    StreamError,
)
