"""What becomes of a request in a tokenizer worker. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from tokservice.protocol import context as contexts
from tokservice.protocol.context import Context
from tokservice.tokenizer.output import Output
from tokservice.tokenizer.prompts import pack
from tokservice.wire.messages import Route, SamplingParams


@dataclass(frozen=True, slots=True)
class Prepared:
    """A valid request, ready for the engine."""

    stream: bool
    num_choices: int
    num_prompt_tokens: int  # of all prompts
    num_pretokenized: int  # prompts that came as token ids
    sampling: SamplingParams
    context: bytes  # for the detokenizer
    prompts: tuple[bytes, ...]  # token ids of each prompt, little-endian uint32


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished JSON body: the request needs no engine."""

    body: bytes


def finished(
    route: Route,
    output: Output,
    *,
    token_ids: Sequence[Sequence[int]],
    prompt_texts: tuple[str | None, ...],  # None where the prompt came as ids, or was truncated
    num_pretokenized: int,
    bare_prompts: tuple[int, ...],
    sampling: SamplingParams,
    max_model_len: int,
    model: str,
    response_id: str,
    created: int,
) -> Prepared:
    """Put a checked request together. ``token_ids``: of each prompt.

    ``max_tokens`` is cut to what the shortest prompt leaves of the context; the engine cuts it for each choice.
    """
    lengths = tuple(map(len, token_ids))
    room = max_model_len - min(lengths)
    if sampling.max_tokens > room:
        sampling = dataclasses.replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
    prompts = tuple(map(pack, token_ids))
    echo = output.logprobs.echo
    tells_prompt = echo or output.return_token_ids or output.logprobs.prompt >= 0
    context = Context(
        route=route,
        response_id=response_id,
        created=created,
        model=model,
        n=sampling.n,
        num_prompt_tokens=lengths,
        stream=output.stream,
        include_usage=bool(output.stream_options.include_usage),
        continuous_usage=bool(output.stream_options.continuous_usage_stats),
        stop=output.stop,
        include_stop=output.include_stop,
        skip_special_tokens=output.skip_special_tokens,
        min_tokens=sampling.min_tokens,
        bare_prompts=bare_prompts,
        num_logprobs=output.logprobs.output,
        num_prompt_logprobs=output.logprobs.prompt,
        echo=echo,
        prompt_texts=prompt_texts if echo else (),
        prompt_ids=prompts if tells_prompt else (),
        return_token_ids=output.return_token_ids,
        tokens_as_ids=output.tokens_as_ids,
        tool_format=output.tools.format,
        tool_names=output.tools.names,
        custom_tools=output.tools.custom,
        parallel_tool_calls=output.tools.parallel,
        reasoning=output.reasoning,
        omits_thoughts=output.extras.omits_thoughts,
        namespaces=output.extras.namespaces,
        more_fields=output.extras.more_fields,
    )
    return Prepared(
        stream=context.stream,
        num_choices=len(token_ids) * sampling.n,
        num_prompt_tokens=sum(lengths),
        num_pretokenized=num_pretokenized,
        sampling=sampling,
        context=contexts.encode(context),
        prompts=prompts,
    )
