"""``/v1/completions`` and ``/generate`` as clients use them: logprobs, echo, ids, guides; also after a death."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.server import Server, running_server
from tests.helpers.sse import events, text_of
from tests.helpers.wait import wait_for

pytestmark = pytest.mark.timeout(300)

FRANCE = "The capital of France is"


def test_echo_scores_a_prompt_as_evaluation_tools_do(api: openai.OpenAI, model: str) -> None:
    scored = api.completions.create(model=model, prompt=f"{FRANCE} Paris", echo=True, logprobs=1, max_tokens=0)
    (choice,) = scored.choices
    assert (choice.text, choice.finish_reason) == (f"{FRANCE} Paris", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    logprobs: Any = choice.logprobs.token_logprobs  # the client's types know no null
    top = choice.logprobs.top_logprobs
    assert top is not None
    assert logprobs[0] is None
    assert all(value < 0 for value in logprobs[1:])
    assert max(top[-1], key=top[-1].__getitem__) == " Paris"
    offsets = choice.logprobs.text_offset
    assert offsets == [choice.text.index(token) for token in choice.logprobs.tokens]
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0


def test_streamed_logprobs_are_those_of_the_plain_answer(api: openai.OpenAI, model: str) -> None:
    def options(**more: Any) -> dict[str, Any]:
        return {"model": model, "prompt": FRANCE, "temperature": 0, "max_tokens": 8, "logprobs": 2, "echo": True} | more

    whole = api.completions.create(**options()).choices[0].logprobs
    chunks = list(api.completions.create(**options(stream=True)))
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    assert whole is not None
    assert [token for part in parts for token in part.tokens] == whole.tokens
    assert [offset for part in parts for offset in part.text_offset] == whole.text_offset
    values = [value for part in parts for value in part.token_logprobs]
    assert values[1:] == pytest.approx(whole.token_logprobs[1:], abs=0.02)


def test_guided_output(api: openai.OpenAI, model: str) -> None:
    for guide, expected in (({"guided_choice": ["maybe so"]}, "maybe so"), ({"guided_regex": "[a]{3}!"}, "aaa!")):
        answer = api.completions.create(model=model, prompt="Say:", max_tokens=12, extra_body=guide)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")


def test_bad_words_do_not_come(api: openai.OpenAI, model: str) -> None:
    answer = api.completions.create(
        model=model, prompt=FRANCE, temperature=0, max_tokens=3, extra_body={"bad_words": ["Paris"]}
    )
    assert "Paris" not in answer.choices[0].text


def test_ids_in_and_ids_out(default_model: Server, api: openai.OpenAI, model: str) -> None:
    http = default_model.http
    prompt = http.post("/tokenize", json={"prompt": FRANCE}).json()["tokens"]
    options = {"prompt_token_ids": prompt, "sampling_params": {"temperature": 0, "max_tokens": 5, "logprobs": 0}}
    plain = http.post("/generate", json=options).json()
    streamed = events(http.post("/generate", json=options | {"stream": True}).content)
    whole = api.completions.create(
        model=model, prompt=FRANCE, temperature=0, max_tokens=5, extra_body={"return_token_ids": True}
    )
    ids = plain["choices"][0]["token_ids"]
    assert ids == whole.choices[0].model_dump()["token_ids"]
    assert ids == [token for event in streamed for token in event["choices"][0]["token_ids"]]
    assert [entry["token_id"] for entry in plain["choices"][0]["logprobs"]] == ids
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == whole.choices[0].text
    wait_for(lambda: default_model.gauge("pretokenized_prompts_total") >= 2, what="ids are counted")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_ids_logprobs_and_text_agree_where_a_stop_string_ends_it(default_model: Server, path: str) -> None:
    with httpx.Client(base_url=default_model.url, timeout=60, trust_env=False) as http:
        prompt = http.post("/tokenize", json={"prompt": FRANCE}).json()["tokens"]
        sampling: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "stop": ["ari"]}
        body = {
            "/generate": {"prompt_token_ids": prompt, "sampling_params": {**sampling, "logprobs": 0}},
            "/v1/completions": {"prompt": FRANCE, **sampling, "logprobs": 0, "return_token_ids": True},
            "/v1/chat/completions": {
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                **sampling,
                "logprobs": True,
                "return_token_ids": True,
            },
        }[path]
        whole = http.post(path, json=body).json()
        streamed = events(http.post(path, json=body | {"stream": True}).content)
        (choice,) = whole["choices"]
        parts = [part for event in streamed for part in event["choices"]]
        ids = choice["token_ids"]
        assert choice["finish_reason"] == "stop"
        assert [token for part in parts for token in part["token_ids"]] == ids
        assert len(ids) == whole["usage"]["completion_tokens"]
        text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        assert "ari" in text
        if path == "/generate":
            assert [entry["token_id"] for entry in choice["logprobs"]] == ids
        elif path == "/v1/completions":
            assert choice["text"] == text_of(streamed) == text.partition("ari")[0]
            assert len(choice["logprobs"]["tokens"]) == len(ids)
        else:
            entries = choice["logprobs"]["content"]
            assert choice["message"]["content"] == text_of(streamed) == text.partition("ari")[0]
            assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == choice["message"]["content"]
            assert len(entries) == len(ids)


def test_a_plain_answer_keeps_its_logprobs_when_workers_die(small: tuple[str, ...]) -> None:
    """The journal holds token ids; the logprobs of those that a dead detokenizer consumed cannot be had again."""
    body = {"prompt": "tell", "max_tokens": 60, "seed": 5, "n": 2, "logprobs": 2, "echo": True, "prompt_logprobs": 1}
    body["ignore_eos"] = True
    with running_server(*small, "--set", "simulated.step_ms=20") as server, ThreadPoolExecutor(1) as clients:
        expected = server.http.post("/v1/completions", json=body).json()["choices"]
        answer = clients.submit(server.http.post, "/v1/completions", json=body)
        wait_for(lambda: server.gauge("generation_tokens_total") > 2 * 60 + 10, what="some tokens were consumed")
        for role in ("detokenizer", "engine"):
            os.kill(server.pid(role), signal.SIGKILL)
        assert answer.result(timeout=90).json()["choices"] == expected


@pytest.mark.parametrize("field", [{"suffix": "x"}, {"best_of": 2}, {"logprobs": 21}, {"guided_regex": "("}])
def test_what_is_refused_is_named(client: httpx.Client, field: dict[str, Any]) -> None:
    for stream in (False, True):
        response = client.post("/v1/completions", json={"prompt": "a", "stream": stream} | field)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == next(iter(field))


REFUSED: list[dict[str, Any]] = [
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": [-1]},
    {"prompt": [5, 49152]},
    {"prompt": [2**31]},
    {"prompt": [2**63]},
    {"prompt": [7] * 8192},
    {"prompt": "a " * 100_000},
    {"prompt": "a", "stop_token_ids": [10**7], "min_tokens": 1},
    {"prompt": "a", "logit_bias": {"10000000": -100}},
    {"prompt": "a", "logit_bias": {"5": 1e9}},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "temperature": 1e9},
    {"prompt": "a", "top_p": 0},
    {"prompt": "a", "top_p": 1.5},
    {"prompt": "a", "top_k": 0.5},
    {"prompt": "a", "min_p": 7},
    {"prompt": "a", "repetition_penalty": 0},
    {"prompt": "a", "presence_penalty": 1e30},
    {"prompt": "a", "n": 10**9},
    {"prompt": "a", "max_tokens": -1},
    {"prompt": "a", "logprobs": 10**6},
    {"prompt": "a", "guided_regex": "(("},
]


def test_refused_requests_leave_a_running_one_as_it_is(default_model: Server) -> None:
    """Ids and values that reach the tensors end the engine, or change what others get: vllm#9634, vllm#54195."""
    body = {"prompt": FRANCE, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    http = default_model.http
    alone = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        pieces = response.iter_bytes()
        stream = next(pieces)
        for refused in REFUSED:
            answer = http.post("/v1/completions", json=refused)
            assert answer.status_code == 400, (refused, answer.text)
            assert answer.json()["error"]["type"] == "invalid_request_error"
        stream += b"".join(pieces)
    assert text_of(events(stream)) == alone


def test_an_echoed_line_separator_stays_on_its_line(client: httpx.Client) -> None:
    """Raw U+2028 in a data line broke clients: typescript-sdk#1926."""
    body = {"prompt": "a\u2028b\u0085c", "echo": True, "max_tokens": 1, "stream": True, "logprobs": 1}
    stream = events(client.post("/v1/completions", json=body).content)
    assert text_of(stream).startswith("a\u2028b\u0085c")
    assert json.dumps(stream)


def test_empty_stream_options_ask_for_nothing(client: httpx.Client) -> None:
    """They turned usage on, and were accepted without a stream: vllm#36379."""
    body = {"prompt": "a", "max_tokens": 2, "stream_options": {}}
    stream = events(client.post("/v1/completions", json=body | {"stream": True}).content)
    assert all("usage" not in event and event["choices"] for event in stream)
    refused = client.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_options")


def test_every_stream_ends_with_its_reason_and_one_done(client: httpx.Client) -> None:
    """[DONE] or the finish reason were missing at times: vllm-mlx#101, vllm-mlx#628."""
    for max_tokens in range(1, 21):
        body = {"prompt": "a", "max_tokens": max_tokens, "stream": True, "logprobs": 0 if max_tokens % 2 else None}
        reasons = [
            choice["finish_reason"]
            for event in events(client.post("/v1/completions", json=body).content)
            for choice in event["choices"]
        ]
        assert reasons[-1] == "length"
        assert set(reasons[:-1]) <= {None}
