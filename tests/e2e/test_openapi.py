"""The API's description against what the server really does: no byte is written that it does not name."""

from __future__ import annotations

from typing import Any, Union

import httpx
import msgspec
import pytest

from tests.helpers.server import Server
from tokservice.protocol.answers import ErrorEnvelope
from tokservice.protocol.openapi import OPERATIONS, Operation
from tokservice.wire.errors import SSE_DONE

POSTS = [operation for operation in OPERATIONS if operation.body]
GETS = [operation for operation in OPERATIONS if not operation.body]
CHAT = [{"role": "user", "content": "Hello!"}]
DIGITS = {"definition": "[0-9]+", "syntax": "regex"}

# Fields that change the shape of an answer, beside the document's own examples.
SHAPES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "One two", "max_tokens": 3, "n": 2, "logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True},
    ],
    "/v1/chat/completions": [
        {"messages": CHAT, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        {"messages": CHAT, "max_tokens": 3, "prompt_logprobs": 1},
        {
            "messages": CHAT,
            "max_tokens": 3,
            "tools": [{"type": "custom", "custom": {"name": "c", "format": {"type": "grammar", "grammar": DIGITS}}}],
            "tool_choice": {"type": "custom", "custom": {"name": "c"}},
        },
    ],
    "/generate": [
        {"prompt_token_ids": [[5, 6], [7]], "sampling_params": {"max_tokens": 3, "logprobs": 1, "prompt_logprobs": 1}},
    ],
    "/v1/responses": [
        {
            "input": CHAT,
            "max_output_tokens": 3,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        },
        {
            "input": CHAT,
            "max_output_tokens": 3,
            "tools": [{"type": "custom", "name": "c", "format": {"type": "grammar", **DIGITS}}],
            "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "c"}]},
        },
        {
            "input": CHAT,
            "max_output_tokens": 3,
            "tools": [{"type": "custom", "name": "c", "format": {"type": "grammar", **DIGITS}}],
            "tool_choice": {"type": "custom", "name": "c"},
        },
    ],
}
WITH_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def check(operation: Operation, answer: httpx.Response) -> None:
    """The answer has exactly the described shape."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        data = answer.content
        if len(operation.events) == 1:
            assert data.endswith(SSE_DONE)
            data = data.removesuffix(SSE_DONE)
        for event in data.decode().split("\n\n")[:-1]:
            msgspec.json.decode(event.rpartition("data: ")[2], type=Union[operation.events])  # noqa: UP007
    else:
        assert answer.headers["content-type"].partition(";")[0] == operation.media_type
        if operation.answer is not None:
            msgspec.json.decode(answer.content, type=operation.answer)


@pytest.mark.parametrize("operation", POSTS, ids=lambda operation: operation.path)
def test_answers_have_the_described_shape(client: httpx.Client, operation: Operation) -> None:
    bodies = [*operation.examples.values(), *SHAPES.get(operation.path, [])]
    if operation.events:
        usage = WITH_USAGE if len(operation.events) == 1 else {}
        bodies += [_without_scores(body) | {"stream": True} | usage for body in bodies]
    for body in bodies:
        check(operation, client.post(operation.path, json=body))


def _without_scores(body: dict[str, Any]) -> dict[str, Any]:
    """The body without what no stream carries."""
    plain = {key: value for key, value in body.items() if key != "prompt_logprobs"}
    return {key: _without_scores(value) if isinstance(value, dict) else value for key, value in plain.items()}


@pytest.mark.parametrize("operation", GETS, ids=lambda operation: operation.path)
def test_pages_have_the_described_shape(client: httpx.Client, operation: Operation) -> None:
    model = client.get("/v1/models").json()["data"][0]["id"]
    check(operation, client.get(operation.path.replace("{model}", model)))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.path)
def test_errors_have_the_described_shape(client: httpx.Client, operation: Operation) -> None:
    path = operation.path.replace("{model}", "x")
    document = client.get("/openapi.json").json()["paths"][operation.path][operation.method]
    for answer in (
        client.request("PATCH", path, content=b"{}"),
        client.post(path, content=b"{"),
        client.post(path, json={"model": "no-such-model", "surprise": 1}),
        client.post(path, content=b"x", headers={"content-type": "text/plain"}),
    ):
        assert answer.status_code >= 400
        assert str(answer.status_code) in document["responses"]
        msgspec.json.decode(answer.content, type=operation.error)


def test_calls_and_thoughts_have_the_described_shape(thinking: Server) -> None:
    by_path = {operation.path: operation for operation in POSTS}
    chat, responses = by_path["/v1/chat/completions"], by_path["/v1/responses"]
    call = '<tool_call>\n{"name": "look_up", "arguments": {"word": "Paris"}}\n</tool_call>'
    more = {"guided_choice": ["<think>hm</think>" + call], "tool_choice": "auto"}
    body = chat.examples["tool"] | more | {"max_tokens": 60}
    other = responses.examples["tool"] | more | {"max_output_tokens": 60}
    for operation, shape, thoughts in (
        (chat, body, "reasoning_content"),
        (chat, body | {"stream": True} | WITH_USAGE, "reasoning_content"),
        (responses, other, "reasoning_text"),
        (responses, other | {"stream": True}, "reasoning_text"),
    ):
        answer = thinking.http.post(operation.path, json=shape)
        check(operation, answer)
        assert thoughts in answer.text
        assert "look_up" in answer.text


def test_a_key_protects_all_but_the_open_pages(impatient: Server) -> None:
    for operation in OPERATIONS:
        status = impatient.http.request(operation.method, operation.path).status_code
        assert (status == 401) is not operation.is_open, operation.path


@pytest.mark.parametrize(
    ("method", "path", "code", "word"),
    [
        ("GET", "/v1/models/no-such-model", "model_not_found", "model"),
        ("GET", "/v1/models/", "not_found", "path"),
        ("POST", "/v1/embeddings", "unsupported", "embeddings"),
        ("POST", "/v1/load_lora_adapter", "unsupported", "adapters"),
        ("GET", "/v1/nowhere", "not_found", "path"),
    ],
)
def test_what_is_not_here_says_so(client: httpx.Client, method: str, path: str, code: str, word: str) -> None:
    answer = client.request(method, path, json={"input": "x"} if method == "POST" else None)
    assert answer.status_code == 404
    error = msgspec.json.decode(answer.content, type=ErrorEnvelope).error
    assert (error.code, word in error.message) == (code, True)
