"""The bodies that clients send, as strict msgspec types. ``reading.py`` reads them.

Used by the tokenizer workers. Imports no tokenizer and no socket.

Rules that hold for every field:

* an explicit null means the same as leaving the field out;
* a field that no type here names is refused with a 400 that names it;
* a field of type ``Refused`` is known but not supported: it is refused unless it has one of the neutral values
  given beside it, which ask for nothing;
* only the fields of type ``Ignored`` are accepted without effect: they are the client's own bookkeeping.
"""

from __future__ import annotations

import typing
from typing import Annotated, Any

import msgspec
from msgspec import Raw

from tokservice.protocol.bounds import INT32, INT64, Bounds
from tokservice.protocol.guide_fields import ResponseFormat, StructuredOutputs
from tokservice.protocol.reading import (
    NULL,
    Ignored,
    Neutral,
    Refused,
    RefusedUnlessEmpty,
    RefusedUnlessFalse,
    neutral_fields,
)
from tokservice.protocol.tools import Tool, ToolChoice

Temperature = Annotated[float, Bounds(0, 100)]
TopP = Annotated[float, Bounds(0, 1, above_low=True)]
Penalty = Annotated[float, Bounds(-2, 2)]
TokenId = Annotated[int, Bounds(0)]  # the vocabulary has an end too, which the engine knows
NumTokens = Annotated[int, Bounds(0)]
NumLogprobs = Annotated[int, Bounds(0, 20)]
Priority = Annotated[int, Bounds(-INT32, INT32 - 1)]
PromptCacheOptions = Annotated[Raw, Neutral({}, {"mode": "implicit"})]  # whatever is known is found, and for no time
PromptCacheRetention = Annotated[Raw, Neutral("in_memory")]
Effort = typing.Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
LOGIT_BIAS = Bounds(-100, 100)

# --- parts ----------------------------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """``stream_options``"""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Raw, Neutral(False)] = NULL


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """The function of a tool call; arguments as the API's JSON text, or as the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CustomCall(msgspec.Struct, forbid_unknown_fields=True):
    """The custom tool of a call, and the text that it was given."""

    name: str
    input: str


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call that an assistant made earlier in the conversation: of a function or of a custom tool."""

    function: FunctionCall | None = None
    id: str | None = None
    type: typing.Literal["function", "custom"] | None = None
    custom: CustomCall | None = None
    index: int | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation. The refused fields occur as null or empty in copies of our own answers."""

    role: typing.Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Raw]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name for it
    refusal: RefusedUnlessEmpty = NULL
    annotations: RefusedUnlessEmpty = NULL
    audio: RefusedUnlessEmpty = NULL
    function_call: RefusedUnlessEmpty = NULL


# --- bodies ---------------------------------------------------------------------------------------------------


class CommonSampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen, and where the output ends: for every way to generate."""

    min_tokens: NumTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: int | None = None
    min_p: Annotated[float, Bounds(0, 1)] | None = None
    seed: Annotated[int, Bounds(-INT64, INT64 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Bounds(0.01, 100)] | None = None
    logit_bias: dict[int, Annotated[float, LOGIT_BIAS]] | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Bounds(-1)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Raw = NULL
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    guided_decoding_backend: Refused = NULL
    guided_whitespace_pattern: Refused = NULL
    allowed_token_ids: Refused = NULL
    use_beam_search: RefusedUnlessFalse = NULL
    length_penalty: Annotated[Raw, Neutral(1, 1.0)] = NULL
    spaces_between_special_tokens: Annotated[Raw, Neutral(True, False)] = NULL  # none come between them anyway


class Sampling(CommonSampling, kw_only=True):
    """The same, with the fields that the Responses API has not, or calls otherwise."""

    n: Annotated[int, Bounds(1)] | None = None
    max_tokens: NumTokens | None = None
    prompt_logprobs: NumLogprobs | None = None


class GenerationBody(Sampling, kw_only=True):
    """The fields that completions and chat completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    user: str | None = None  # bookkeeping of the client, without effect, as are the four below
    metadata: Ignored = NULL
    service_tier: Ignored = NULL
    safety_identifier: Ignored = NULL
    prompt_cache_key: Ignored = NULL
    store: RefusedUnlessFalse = NULL


class CompletionBody(GenerationBody, kw_only=True):
    """``POST /v1/completions``"""

    prompt: str | list[TokenId | str | list[TokenId]]
    best_of: Annotated[int, Bounds(1)] | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    suffix: Annotated[Raw, Neutral("")] = NULL


class ChatBody(GenerationBody, kw_only=True):
    """``POST /v1/chat/completions``"""

    messages: list[Message]
    max_completion_tokens: Annotated[int, Bounds(1)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    echo: RefusedUnlessFalse = NULL
    chat_template: Refused = NULL  # a template is code: it comes from the model's folder alone
    functions: RefusedUnlessEmpty = NULL
    function_call: Annotated[Raw, Neutral("none")] = NULL
    documents: RefusedUnlessEmpty = NULL
    verbosity: Annotated[Raw, Neutral("medium")] = NULL
    modalities: Annotated[Raw, Neutral(["text"])] = NULL
    include_reasoning: Annotated[Raw, Neutral(True)] = NULL
    separate_reasoning: Annotated[Raw, Neutral(True)] = NULL
    stream_reasoning: Annotated[Raw, Neutral(True)] = NULL
    moderation: Refused = NULL
    prompt_cache_options: PromptCacheOptions = NULL
    prompt_cache_retention: PromptCacheRetention = NULL
    audio: Refused = NULL
    prediction: Refused = NULL
    web_search_options: Refused = NULL


class GenerateSampling(Sampling, kw_only=True):
    """``sampling_params`` of ``POST /generate``"""

    logprobs: NumLogprobs | None = None


class GenerateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /generate``: token ids in, token ids out."""

    prompt_token_ids: list[TokenId | list[TokenId]]
    sampling_params: GenerateSampling | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority | None = None


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /tokenize``: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    chat_template: Refused = NULL


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /detokenize``"""

    tokens: list[TokenId]
    model: str | None = None


MESSAGE_NEUTRAL = neutral_fields(Message)
STREAM_OPTIONS_NEUTRAL = neutral_fields(StreamOptions)
SAMPLING_NEUTRAL = neutral_fields(GenerateSampling)
