"""What becomes of a request in a tokenizer worker. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from tokservice.protocol import context as contexts
from tokservice.protocol.context import Context
from tokservice.protocol.requests import GenerationBody, StreamOptions
from tokservice.tokenizer.prompts import pack
from tokservice.wire.messages import Route, SamplingParams


@dataclass(frozen=True, slots=True)
class Prepared:
    """A valid request, ready for the engine."""

    stream: bool
    num_choices: int
    num_prompt_tokens: int  # of all prompts
    sampling: SamplingParams
    context: bytes  # for the detokenizer
    prompts: tuple[bytes, ...]  # token ids of each prompt, little-endian uint32


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished JSON body: the request needs no engine."""

    body: bytes


def finished(
    route: Route,
    body: GenerationBody,
    *,
    token_ids: Sequence[Sequence[int]],
    bare_prompts: tuple[int, ...],
    sampling: SamplingParams,
    stop: tuple[str, ...],
    max_model_len: int,
    model: str,
    response_id: str,
    created: int,
) -> Prepared:
    """Put a checked request together. ``token_ids``: of each prompt.

    ``max_tokens`` is cut to what the longest prompt leaves of the context, for all choices alike.
    """
    lengths = tuple(map(len, token_ids))
    room = max_model_len - max(lengths)
    if sampling.max_tokens > room:
        sampling = dataclasses.replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
    options = body.stream_options or StreamOptions()
    context = Context(
        route=route,
        response_id=response_id,
        created=created,
        model=model,
        n=sampling.n,
        num_prompt_tokens=lengths,
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        stop=stop,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=sampling.min_tokens,
        bare_prompts=bare_prompts,
    )
    return Prepared(
        stream=context.stream,
        num_choices=len(token_ids) * sampling.n,
        num_prompt_tokens=sum(lengths),
        sampling=sampling,
        context=contexts.encode(context),
        prompts=tuple(map(pack, token_ids)),
    )
