"""Logprobs, and what is told of the prompt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.preparers import CHAT, PROMPT, prepared, refused
from tokservice.protocol import context as contexts
from tokservice.tokenizer.prepare import Preparer


def test_logprobs(preparer: Preparer) -> None:
    def counts(**fields: Any) -> tuple[int, int]:
        sampling = prepared(preparer, **fields).sampling
        return sampling.num_logprobs, sampling.num_prompt_logprobs

    assert counts(**PROMPT) == counts(**CHAT) == counts(**CHAT, top_logprobs=0) == (-1, -1)
    assert counts(**PROMPT, logprobs=0) == (0, -1)
    assert counts(**PROMPT, logprobs=5) == (5, -1)
    assert counts(**PROMPT, logprobs=5, echo=True) == (5, 5)
    assert counts(**PROMPT, logprobs=1, prompt_logprobs=3, echo=True) == (1, 3)
    assert counts(**CHAT, logprobs=True) == (0, -1)
    assert counts(**CHAT, logprobs=True, top_logprobs=20) == (20, -1)
    assert counts(**CHAT, prompt_logprobs=0) == (-1, 0)


def test_echo_without_output(preparer: Preparer) -> None:
    """max_tokens 0 with echo crashed the server: vllm#6521."""
    result = prepared(preparer, prompt=["hello", "world"], max_tokens=0, echo=True)
    assert result.sampling.max_tokens == 0
    context = contexts.decode(result.context)
    assert (context.prompt_texts, context.prompt_ids) == (("hello", "world"), result.prompts)
    assert contexts.decode(prepared(preparer, prompt=[5, 6], echo=True).context).prompt_texts == (None,)
    truncated = prepared(preparer, prompt="one two three", echo=True, truncate_prompt_tokens=1)
    assert contexts.decode(truncated.context).prompt_texts == (None,)


def test_prompts_travel_to_the_detokenizer_only_where_they_are_told(preparer: Preparer) -> None:
    assert contexts.decode(prepared(preparer, **PROMPT, logprobs=2).context).prompt_ids == ()
    for fields in ({"echo": True}, {"return_token_ids": True}, {"prompt_logprobs": 0}):
        assert contexts.decode(prepared(preparer, **PROMPT, **fields).context).prompt_ids


@pytest.mark.parametrize(
    ("fields", "entries", "param"),
    [
        ({"echo": True}, 1, "echo"),
        ({"echo": True, "logprobs": 1}, 2, "logprobs"),
        ({"prompt_logprobs": 20}, 21, "prompt_logprobs"),
        ({"prompt_logprobs": 2, "echo": True, "logprobs": 0}, 4, "prompt_logprobs"),
        ({"return_token_ids": True}, 1, "return_token_ids"),
    ],
)
def test_an_answer_that_would_tell_too_much_of_prompts_is_refused(
    preparer: Preparer, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], entries: int, param: str
) -> None:
    """n=40 of a prompt of 8,000 tokens with prompt_logprobs=20 took gigabytes, and never got its answer, which was too
    large for any message: of the kind of gpt4all#3635.
    """
    body = {"prompt": [[5] * 10, [5] * 7], "n": 3} | fields
    monkeypatch.setattr("tokservice.tokenizer.logprob_fields.MAX_TOLD", 17 * 3 * entries)
    assert prepared(preparer, **body).num_choices == 6
    monkeypatch.setattr("tokservice.tokenizer.logprob_fields.MAX_TOLD", 17 * 3 * entries - 1)
    error = refused(preparer, body)
    assert (error.status, error.code, error.param) == (400, "answer_too_large", param)
    prepared(preparer, **body | dict.fromkeys(fields))
