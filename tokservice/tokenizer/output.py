"""What a response is to look like. Tokenizer worker; pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokservice.protocol.reading import refuse_unsupported
from tokservice.protocol.requests import (
    STREAM_OPTIONS_NEUTRAL,
    GenerateBody,
    GenerationBody,
    Sampling,
    StreamOptions,
)
from tokservice.tokenizer.logprob_fields import LogprobFields, logprob_fields
from tokservice.tokenizer.sampling import stop_strings
from tokservice.tokenizer.tool_use import ToolUse
from tokservice.wire.errors import RequestError
from tokservice.wire.messages import EngineLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What answers of other APIs have beside those of chats: see Context."""

    more_fields: bytes = b"{}"
    omits_thoughts: bool = False
    namespaces: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What the response is to look like, as far as the request's body says so."""

    stream: bool
    stream_options: StreamOptions
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    logprobs: LogprobFields
    return_token_ids: bool
    tokens_as_ids: bool
    tools: ToolUse = field(default_factory=ToolUse)
    reasoning: str = ""
    extras: Extras = field(default_factory=Extras)


def output_of(body: GenerationBody | GenerateBody, sampling: Sampling, limits: EngineLimits) -> Output:
    """What a body says of the response; tools and reasoning aside. Raises RequestError (400)."""
    _check_stream_options(body)
    return Output(
        stream=bool(body.stream),
        stream_options=body.stream_options or StreamOptions(),
        stop=stop_strings(sampling.stop),
        include_stop=bool(sampling.include_stop_str_in_output),
        skip_special_tokens=sampling.skip_special_tokens is not False,
        logprobs=logprob_fields(sampling, stream=bool(body.stream), vocab_size=limits.vocab_size),
        return_token_ids=isinstance(body, GenerationBody) and bool(body.return_token_ids),
        tokens_as_ids=isinstance(body, GenerationBody) and bool(body.return_tokens_as_token_ids),
    )


def _check_stream_options(body: GenerationBody | GenerateBody) -> None:
    options = body.stream_options
    if options is None:
        return
    refuse_unsupported(options, STREAM_OPTIONS_NEUTRAL, param="stream_options")
    if not body.stream:
        message = "'stream_options' is allowed only with 'stream': true."
        raise RequestError(message, param="stream_options", code="invalid_value")
    if options.continuous_usage_stats and not options.include_usage:
        message = "'continuous_usage_stats' needs 'include_usage': true."
        raise RequestError(message, param="stream_options", code="invalid_value")
