"""What an engine refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine.checks import check_request
from engine.core import EngineRequest, RequestRefused
from tokservice.wire.messages import EngineLimits, SamplingParams

LIMITS = EngineLimits(max_model_len=32, vocab_size=100, kv_cache_tokens=1000, max_num_seqs=4)


def prompt(*ids: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(ids, dtype=np.uint32)


def test_extremes_that_are_fine() -> None:
    sampling = SamplingParams(
        max_tokens=2**40, top_k=2**31, temperature=1e-30, seed=2**63 - 1, stop_token_ids=(99,), min_tokens=10**6
    )
    check_request(EngineRequest("r", 1, sampling, (prompt(*range(31)),)), LIMITS)
    check_request(EngineRequest("r", 1, SamplingParams(max_tokens=0), (prompt(0),)), LIMITS)


@pytest.mark.parametrize(
    "prompts",
    [(), (prompt(),), (prompt(1), prompt()), (prompt(100),), (prompt(2**32 - 1),), (prompt(*range(32)),)],
)
def test_bad_prompts(prompts: tuple[np.ndarray[tuple[int], np.dtype[np.uint32]], ...]) -> None:
    """Empty prompts and ids outside the vocabulary have ended whole engines elsewhere."""
    with pytest.raises(RequestRefused):
        check_request(EngineRequest("r", 1, SamplingParams(), prompts), LIMITS)


@pytest.mark.parametrize(
    "values",
    [
        {"n": 0},
        {"n": 1_000_000},
        {"max_tokens": -1},
        {"min_tokens": -1},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.5},
        {"presence_penalty": math.inf},
        {"frequency_penalty": -math.inf},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.nan},
        {"seed": -1},
        {"seed": 2**63},
        {"stop_token_ids": (100,)},
        {"stop_token_ids": (10**7,), "min_tokens": 1},
        {"stop_token_ids": (-1,)},
        {"logit_bias_ids": (100,), "logit_bias_values": (1.0,)},
        {"logit_bias_ids": (1,), "logit_bias_values": ()},
        {"logit_bias_ids": (1,), "logit_bias_values": (math.nan,)},
        {"bad_words_ids": ((),)},
        {"bad_words_ids": ((1, 100),)},
        {"num_logprobs": 10**6},
        {"num_prompt_logprobs": -2},
        {"guide_kind": "sonnet"},
    ],
    ids=str,
)
def test_absurd_sampling(values: dict[str, object]) -> None:
    sampling = SamplingParams(**values)  # type: ignore[arg-type]
    with pytest.raises(RequestRefused):
        check_request(EngineRequest("r", 1, sampling, (prompt(1),)), LIMITS)


def test_bad_resume() -> None:
    sampling = SamplingParams(n=2)
    with pytest.raises(RequestRefused, match="output_ids"):
        check_request(EngineRequest("r", 1, sampling, (prompt(1),), (prompt(1),)), LIMITS)
    with pytest.raises(RequestRefused, match="output_ids"):
        check_request(EngineRequest("r", 1, sampling, (prompt(1),), (prompt(1), prompt(100))), LIMITS)
    with pytest.raises(RequestRefused, match="max_model_len"):
        check_request(EngineRequest("r", 1, sampling, (prompt(1),), (prompt(1), prompt(*range(32)))), LIMITS)
