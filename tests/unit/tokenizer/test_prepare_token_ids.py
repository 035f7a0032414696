"""``/generate``: token ids in and out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.preparers import NOW, VOCAB_SIZE, ids, prepared, refused
from tokservice.tokenizer.prepare import Prepared, Preparer
from tokservice.wire.messages import Route


def test_token_ids_in_and_out(preparer: Preparer) -> None:
    body = {"prompt_token_ids": [[5, 6], [7]], "sampling_params": {"n": 2, "max_tokens": 3, "logprobs": 1}}
    result = preparer.prepare(Route.GENERATE, [json.dumps(body).encode()], NOW)
    assert isinstance(result, Prepared)
    assert (ids(result), result.num_choices, result.num_pretokenized) == ([[5, 6], [7]], 4, 2)
    assert (result.sampling.max_tokens, result.sampling.num_logprobs) == (3, 1)
    assert prepared(preparer, prompt=["a", "b"]).num_pretokenized == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt_token_ids"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [[]]}, "prompt_token_ids"),
        ({"prompt_token_ids": [5, [5]]}, "prompt_token_ids"),
        ({"prompt_token_ids": [VOCAB_SIZE]}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [5], "prompt": "a"}, "prompt"),
        ({"prompt_token_ids": [5], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"prompt_token_ids": [5], "sampling_params": {"echo": True}}, "sampling_params"),
        ({"prompt_token_ids": [5], "stream_options": {}}, "stream_options"),
    ],
)
def test_wrong_values_with_token_ids(preparer: Preparer, body: dict[str, Any], param: str) -> None:
    assert refused(preparer, body, Route.GENERATE).param == param
