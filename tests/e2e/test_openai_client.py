"""The official ``openai`` client against the default model on the CPU."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.helpers.http_client import post
from tests.helpers.server import Server
from tests.helpers.wait import wait_for

pytestmark = pytest.mark.timeout(300)

GONE_S = 10.0  # until the engine is free; 8000 tokens take it far longer
FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]


def test_the_model_is_listed_with_its_context(api: openai.OpenAI, model: str) -> None:
    assert model == "smollm2-135m-instruct"
    assert api.models.retrieve(model).model_dump()["max_model_len"] == 8192


def test_chat_streamed_and_plain_say_the_same(api: openai.OpenAI, model: str) -> None:
    plain = api.chat.completions.create(model=model, messages=FRANCE, temperature=0, max_tokens=24)
    stream = api.chat.completions.create(
        model=model,
        messages=FRANCE,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "Paris" in (plain.choices[0].message.content or "")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == plain.choices[0].finish_reason
    assert plain.usage is not None
    assert chunks[-1].usage is not None
    for usage in (plain.usage, chunks[-1].usage):
        assert usage.prompt_tokens == plain.usage.prompt_tokens > 0
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens


def test_completions_streamed_and_plain_say_the_same(api: openai.OpenAI, model: str) -> None:
    prompt = "Once upon a time"
    plain = api.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=20)
    chunks = list(api.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=20, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text
    assert plain.choices[0].finish_reason == "length"
    assert plain.usage is not None
    assert (plain.usage.prompt_tokens, plain.usage.completion_tokens) == (4, 20)


def test_a_stop_string_cuts_exactly(api: openai.OpenAI, model: str) -> None:
    whole = api.chat.completions.create(model=model, messages=FRANCE, temperature=0, max_tokens=24)
    cut = api.chat.completions.create(model=model, messages=FRANCE, temperature=0, max_tokens=24, stop=["apital"])
    text = whole.choices[0].message.content or ""
    assert "apital" in text
    assert cut.choices[0].message.content == text.partition("apital")[0]
    assert cut.choices[0].finish_reason == "stop"


def test_a_seed_repeats_and_choices_differ(api: openai.OpenAI, model: str) -> None:
    def sample(seed: int) -> list[str]:
        answer = api.completions.create(
            model=model, prompt="The best thing about", n=3, temperature=1.0, top_p=0.95, seed=seed, max_tokens=12
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.text for choice in answer.choices]

    first = sample(7)
    assert sample(7) == first
    assert sample(8) != first
    assert len(set(first)) == 3


def test_a_client_that_leaves_frees_the_engine(api: openai.OpenAI, model: str, default_model: Server) -> None:
    """After the client hung up the engine decoded to the limit: mini-sglang#15."""
    stream = api.completions.create(
        model=model, prompt="Count: 1 2 3", max_tokens=8000, stream=True, temperature=0, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    wait_for(lambda: default_model.gauge("num_requests_running") == 1, what="it runs")
    stream.close()
    wait_for(lambda: default_model.gauge("num_requests_running") == 0, GONE_S, "it was aborted")
    wait_for(lambda: default_model.gauge("num_requests_unfinished") == 0, GONE_S, "no tombstone is left")


def test_a_plain_request_that_is_abandoned_frees_the_engine(default_model: Server, model: str) -> None:
    """A disconnect on a plain request was never noticed: vllm-mlx#457."""
    body = {"model": model, "prompt": "Count:", "max_tokens": 8000, "ignore_eos": True}
    with default_model.connect() as client:
        client.send(post(json.dumps(body).encode()))
        wait_for(lambda: default_model.gauge("num_requests_running") == 1, what="it runs")
    wait_for(lambda: default_model.gauge("num_requests_running") == 0, GONE_S, "it was aborted")


def test_errors_are_the_clients_own_exceptions(api: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        api.chat.completions.create(model="no-such-model", messages=FRANCE)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        api.chat.completions.create(model=model, messages=FRANCE, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        api.completions.create(model=model, prompt="word " * 9000, stream=True)
    assert too_long.value.code == "context_length_exceeded"
