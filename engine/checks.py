"""Which requests an engine refuses, decided before any tensor is touched.

Engine process; pure. The tokenizer workers check the same things against the published limits, with messages
for clients; these checks are the engine's own guarantee that no request can harm its batch-mates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from engine.core import EngineRequest, RequestRefused, TokenIds
from tokservice.wire.messages import EngineLimits, SamplingParams

MAX_CHOICES = 4096  # prompts * n of one request
MAX_LOGPROBS = 128
MAX_PENALTY = 100.0  # presence, frequency, repetition, and logit_bias either way
MAX_TEMPERATURE = 100.0
MAX_SEED = 2**63 - 1
GUIDE_KINDS = ("", "json_schema", "regex", "grammar", "choice")


def check_request(request: EngineRequest, limits: EngineLimits) -> None:
    """Raise RequestRefused, naming the first fault, unless the engine can run every choice of the request."""
    for fault in _faults(request, limits):
        raise RequestRefused(fault)


def _faults(request: EngineRequest, limits: EngineLimits) -> Iterator[str]:
    if not request.prompts:
        yield "no prompt"
    if not 1 <= request.sampling.n <= MAX_CHOICES or request.num_choices > MAX_CHOICES:
        yield f"n: between 1 and {MAX_CHOICES} choices"
    for prompt in request.prompts:
        if len(prompt) == 0:
            yield "prompt: at least one token"
        if len(prompt) >= limits.max_model_len:
            yield f"prompt: {len(prompt)} tokens, where max_model_len {limits.max_model_len} leaves no room for output"
        if _outside(prompt, limits.vocab_size):
            yield f"prompt: a token id above the vocabulary ({limits.vocab_size} ids)"
    for name, values in (("output_ids", request.output_ids), ("finished", request.finished)):
        if values and len(values) != request.num_choices:
            yield f"{name}: one entry for each of {request.num_choices} choices"
    for choice, output in enumerate(request.output_ids):
        if _outside(output, limits.vocab_size):
            yield f"output_ids: a token id above the vocabulary ({limits.vocab_size} ids)"
        if len(request.prompts[choice // request.sampling.n]) + len(output) > limits.max_model_len:
            yield f"output_ids: prompt and output exceed max_model_len {limits.max_model_len}"
    yield from _sampling_faults(request.sampling, limits.vocab_size)


def _sampling_faults(sampling: SamplingParams, vocab_size: int) -> Iterator[str]:
    ranges: tuple[tuple[str, float, float, float], ...] = (
        ("max_tokens", sampling.max_tokens, 0, math.inf),
        ("min_tokens", sampling.min_tokens, 0, math.inf),
        ("temperature", sampling.temperature, 0.0, MAX_TEMPERATURE),
        ("top_p", sampling.top_p, 0.0, 1.0),
        ("top_k", sampling.top_k, 0, math.inf),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
        ("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
        ("repetition_penalty", sampling.repetition_penalty, 1 / MAX_PENALTY, MAX_PENALTY),
        ("seed", sampling.seed, 0, MAX_SEED),
        ("num_logprobs", sampling.num_logprobs, -1, MAX_LOGPROBS),
        ("num_prompt_logprobs", sampling.num_prompt_logprobs, -1, MAX_LOGPROBS),
        *(("logit_bias", value, -MAX_PENALTY, MAX_PENALTY) for value in sampling.logit_bias_values),
    )
    for name, value, low, high in ranges:
        if not low <= value <= high:  # NaN fails too
            yield f"{name}: {value} is not between {low} and {high}"
    if sampling.top_p == 0:
        yield "top_p: must be above 0"
    if len(sampling.logit_bias_ids) != len(sampling.logit_bias_values):
        yield "logit_bias: one value for each id"
    if not all(sampling.bad_words_ids):
        yield "bad_words: an empty word"
    id_lists: tuple[tuple[str, Iterable[int]], ...] = (
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", sampling.logit_bias_ids),
        *(("bad_words", word) for word in sampling.bad_words_ids),
    )
    for name, ids in id_lists:
        if any(not 0 <= token < vocab_size for token in ids):
            yield f"{name}: a token id outside the vocabulary ({vocab_size} ids)"
    if sampling.guide_kind not in GUIDE_KINDS:
        yield f"guide_kind: unknown kind {sampling.guide_kind!r}"


def _outside(ids: TokenIds, vocab_size: int) -> bool:
    return len(ids) > 0 and int(np.max(ids)) >= vocab_size
