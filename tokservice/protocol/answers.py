"""What clients read, as types: the shapes that ``responses.py`` and its neighbours write. They describe the API.

Used by the API's description alone, and by the tests that hold it and the written bytes together. A field whose
default is UNSET is left out where it has nothing to say.
"""

from __future__ import annotations

import typing

import msgspec
from msgspec import UNSET, UnsetType


class Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of all: nothing is written that is not named here."""


# --- parts ----------------------------------------------------------------------------------------------------


class CachedTokens(Answer):
    """``prompt_tokens_details``"""

    cached_tokens: int


class ReasoningTokens(Answer):
    """``completion_tokens_details``"""

    reasoning_tokens: int


class Usage(Answer):
    """Tokens of all prompts and choices; those of an output end with its stop string."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class CompletionLogprobs(Answer):
    """Parallel lists, an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ScoredToken(Answer):
    """A token that might have come here."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(ScoredToken, kw_only=True):
    """The token that came, and the most likely ones."""

    top_logprobs: list[ScoredToken]


class ChatLogprobs(Answer):
    """``logprobs`` of a chat completion"""

    content: list[ChatLogprob]
    refusal: None = None


class PromptLogprob(Answer):
    """What is known of a token of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str


class ScoredId(Answer):
    """A token that might have come here."""

    token_id: int
    logprob: float


class GenerateLogprob(ScoredId, kw_only=True):
    """The token that came, and the most likely ones."""

    top_logprobs: list[ScoredId]


class CalledFunction(Answer):
    """A call; the arguments are JSON in a text."""

    name: str
    arguments: str


class CalledCustom(Answer):
    """A call of a custom tool; the input is a text."""

    name: str
    input: str


class AnsweredToolCall(Answer):
    """A tool call of the model: of a function or of a custom tool."""

    id: str
    type: typing.Literal["function", "custom"]
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET


class CalledFunctionDelta(Answer):
    """More of a call."""

    arguments: str
    name: str | UnsetType = UNSET


class CalledCustomDelta(Answer):
    """More of a call of a custom tool."""

    input: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Answer):
    """More of the tool call of this index."""

    index: int
    function: CalledFunctionDelta | UnsetType = UNSET
    custom: CalledCustomDelta | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: typing.Literal["function", "custom"] | UnsetType = UNSET


class AssistantMessage(Answer):
    """The model's message; without content where it calls tools instead."""

    role: typing.Literal["assistant"]
    content: str | None
    refusal: None  # a model's refusal is content like any other
    annotations: list[str]  # there are none
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[AnsweredToolCall] | UnsetType = UNSET


class MessageDelta(Answer):
    """What an event adds to the message."""

    role: typing.Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


PromptLogprobs = list[dict[str, PromptLogprob] | None]
Finish = typing.Literal["stop", "length"]
ChatFinish = typing.Literal["stop", "length", "tool_calls"]


# --- choices --------------------------------------------------------------------------------------------------


class CompletionText(Answer):
    """What a completion and its deltas share."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(CompletionText, kw_only=True):
    """A completion; choice ``i * n + j`` is the j-th of prompt i."""

    finish_reason: Finish
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionChunkChoice(CompletionText, kw_only=True):
    """What an event adds to a completion."""

    finish_reason: Finish | None


class ChatChoice(Answer):
    """An answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(Answer):
    """What an event adds to an answer."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    token_ids: list[int] | UnsetType = UNSET


class OutputIds(Answer):
    """What an output and its deltas share."""

    index: int
    token_ids: list[int]
    logprobs: list[GenerateLogprob] | None


class GenerateChoice(OutputIds, kw_only=True):
    """The ids of an output."""

    finish_reason: Finish
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class GenerateChunkChoice(OutputIds, kw_only=True):
    """What an event adds to an output."""

    finish_reason: Finish | None


# --- bodies ---------------------------------------------------------------------------------------------------


class Generated(Answer):
    """The fields that all answers of the model share."""

    id: str
    created: int
    model: str


class Completion(Generated, kw_only=True):
    """The body of a completion."""

    object: typing.Literal["text_completion"]
    choices: list[CompletionChoice]
    system_fingerprint: str  # the server's version
    usage: Usage


class CompletionChunk(Generated, kw_only=True):
    """An event of a streamed completion."""

    object: typing.Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    system_fingerprint: str | UnsetType = UNSET  # where a choice ends
    usage: Usage | UnsetType | None = UNSET


class ChatCompletion(Generated, kw_only=True):
    """The body of a chat completion."""

    object: typing.Literal["chat.completion"]
    choices: list[ChatChoice]
    system_fingerprint: str  # the server's version
    service_tier: typing.Literal["default"]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatCompletionChunk(Generated, kw_only=True):
    """An event of a streamed chat completion."""

    object: typing.Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    system_fingerprint: str | UnsetType = UNSET  # where a choice ends, as the next
    service_tier: typing.Literal["default"] | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class GeneratedIds(Generated, kw_only=True):
    """The body of ``/generate``."""

    object: typing.Literal["generate"]
    choices: list[GenerateChoice]
    usage: Usage


class GeneratedIdsChunk(Generated, kw_only=True):
    """An event of a streamed ``/generate``."""

    object: typing.Literal["generate.chunk"]
    choices: list[GenerateChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class Tokens(Answer):
    """The body of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(Answer):
    """The body of ``/detokenize``."""

    prompt: str


class ErrorDetail(Answer):
    """What went wrong; ``param`` names the field, ``code`` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(Answer):
    """Every error, but those of Anthropic's API; also the last event of a stream that failed, before ``[DONE]``."""

    error: ErrorDetail


class Model(Answer):
    """A model that is served."""

    id: str
    object: typing.Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    type: typing.Literal["model"]
    display_name: str
    created_at: str
    lifecycle: typing.Literal["active"]


class ModelList(Answer):
    """All of them, in the forms of both APIs."""

    object: typing.Literal["list"]
    data: list[Model]
    has_more: typing.Literal[False]
    first_id: str
    last_id: str


class Version(Answer):
    """The server's version."""

    version: str


class Status(Answer):
    """How the server is."""

    status: str
    reason: str | UnsetType = UNSET
