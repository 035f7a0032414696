"""A request's sampling fields, checked and completed with the model's own defaults. Tokenizer worker; pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokservice.protocol.bounds import INT64, bounds_of
from tokservice.protocol.reading import refuse_unsupported
from tokservice.protocol.requests import LOGIT_BIAS, SAMPLING_NEUTRAL, CommonSampling, Sampling
from tokservice.tokenizer.guides import Guide
from tokservice.tokenizer.logprob_fields import LogprobFields
from tokservice.tokenizer.model_files import read_json
from tokservice.tokenizer.prompts import check_token_ids
from tokservice.wire.errors import RequestError, StartupError
from tokservice.wire.messages import EngineLimits, SamplingParams

T = TypeVar("T")

MAX_SEED = INT64 - 1
MIN_TEMPERATURE = 1e-5  # below it sampling is greedy: the logits divided by it would overflow
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_LISTED_IDS = 1024  # of stop_token_ids and of logit_bias


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What ``generation_config.json`` of the model says; it applies where a request leaves the field out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def load_defaults(model_dir: Path) -> GenerationDefaults:
    """Read ``generation_config.json``, where there is one. Raises StartupError."""
    path = model_dir / "generation_config.json"
    config = read_json(path)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(GenerationDefaults):
        name, value = field.name, config.get(field.name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or (name == "top_k" and value != int(value)):
            raise StartupError(f"{path}: {name} must be a number, not {value!r}")
        bounds = bounds_of(CommonSampling).get(name)
        if bounds and not bounds.allow(value):
            raise StartupError(f"{path}: {name} {bounds.rule}, not {value!r}")
        values[name] = int(value) if name == "top_k" else float(value)
    return GenerationDefaults(**values)


def sampling_params(
    body: Sampling,
    *,
    max_tokens: int,
    logprobs: LogprobFields,
    guide: Guide | None,
    bad_words_ids: tuple[tuple[int, ...], ...],
    priority: int,
    defaults: GenerationDefaults,
    limits: EngineLimits,
    seed: int,
) -> SamplingParams:
    """Build the parameters for the engine. Raises RequestError (400), which names the field.

    The numbers of the body are within the bounds of their types.
    ``max_tokens`` is what the client asked for, or the default; 0 is of use where the prompt is scored or echoed.
    ``seed`` is used where the client gave none.
    """
    refuse_unsupported(body, SAMPLING_NEUTRAL)
    if max_tokens == 0 and not logprobs.about_prompt:
        raise _invalid("max_tokens", 0, "must be at least 1 where the prompt is not scored")
    min_tokens = _or(body.min_tokens, 0)
    if min_tokens > max_tokens:
        raise _invalid("min_tokens", min_tokens, f"must not be above 'max_tokens' ({max_tokens})")
    temperature = _or(body.temperature, defaults.temperature)
    top_k = _or(body.top_k, defaults.top_k)
    if body.seed is not None:
        seed = body.seed & MAX_SEED
    stop_token_ids = tuple(dict.fromkeys(body.stop_token_ids or ()))
    check_token_ids("stop_token_ids", stop_token_ids, limits.vocab_size)
    logit_bias = body.logit_bias or {}
    check_token_ids("logit_bias", tuple(logit_bias), limits.vocab_size)
    for name, ids in (("stop_token_ids", stop_token_ids), ("logit_bias", logit_bias)):
        if len(ids) > MAX_LISTED_IDS:
            message = f"'{name}' may hold at most {MAX_LISTED_IDS} ids."
            raise RequestError(message, param=name, code="invalid_value")
    for value in logit_bias.values():
        LOGIT_BIAS.check("logit_bias", value)
    return SamplingParams(
        n=_or(body.n, 1),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_p=_or(body.top_p, defaults.top_p),
        top_k=top_k if 0 < top_k < limits.vocab_size else 0,
        min_p=_or(body.min_p, defaults.min_p),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        seed=seed,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=stop_token_ids,
        logit_bias_ids=tuple(logit_bias),
        logit_bias_values=tuple(logit_bias.values()),
        bad_words_ids=bad_words_ids,
        num_logprobs=logprobs.output,
        num_prompt_logprobs=logprobs.engine_prompt,
        guide_kind=guide.kind if guide else "",
        guide=guide.text if guide else "",
        priority=priority,
    )


def stop_strings(stop: str | list[str] | None, param: str = "stop") -> tuple[str, ...]:
    """``stop``, by the client's name for it. Raises RequestError; an empty string would match everywhere."""
    stops = (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop or ()))
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError(f"'{param}' may hold at most {MAX_STOP_STRINGS} strings.", param=param, code="invalid_value")
    if "" in stops:
        raise RequestError(f"'{param}' must not hold an empty string.", param=param, code="invalid_value")
    if any(len(text) > MAX_STOP_CHARS for text in stops):
        message = f"A stop string may have at most {MAX_STOP_CHARS} characters."
        raise RequestError(message, param=param, code="invalid_value")
    return stops


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _invalid(param: str, value: float, rule: str) -> RequestError:
    return RequestError(f"Invalid '{param}': {rule}, not {value!s:.40}.", param=param, code="invalid_value")
