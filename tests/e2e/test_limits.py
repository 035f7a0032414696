"""Every limit of what a request may ask for, from outside: just below it is served, just above it is a 400."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

COMPLETION = {"prompt": "Hi", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def nested(depth: int) -> Any:
    """A schema of so many objects, one in the other."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def guided(schema: Any) -> dict[str, Any]:
    """A response format."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


def schema_of(num_bytes: int) -> dict[str, Any]:
    """A schema of about so many bytes, which demands little."""
    return {"type": "object", "description": "x" * num_bytes}


# param: what is allowed, and what is too much.
LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "n": ({"n": 128}, {"n": 129}),
    "prompt": ({"prompt": ["a"] * 128}, {"prompt": ["a"] * 129}),
    "max_tokens": ({"max_tokens": 1}, {"max_tokens": -1}),
    "logprobs": ({"logprobs": 20}, {"logprobs": 21}),
    "prompt_logprobs": ({"prompt_logprobs": 20}, {"prompt_logprobs": 21}),
    "stop": ({"stop": [chr(97 + at) for at in range(16)]}, {"stop": [chr(97 + at) for at in range(17)]}),
    "stop_token_ids": ({"stop_token_ids": list(range(1024))}, {"stop_token_ids": list(range(1025))}),
    "logit_bias": (
        {"logit_bias": {str(at): 1 for at in range(1024)}},
        {"logit_bias": {str(at): 1 for at in range(1025)}},
    ),
    "bad_words": ({"bad_words": ["a"] * 128}, {"bad_words": ["a"] * 129}),
    "seed": ({"seed": 2**63 - 1}, {"seed": 2**63}),
    "priority": ({"priority": 2**31 - 1}, {"priority": 2**31}),
    "temperature": ({"temperature": 100}, {"temperature": 100.1}),
    "top_k": ({"top_k": 10**9}, {"top_k": 0.5}),
}
CHAT_LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "top_logprobs": ({"logprobs": True, "top_logprobs": 20}, {"logprobs": True, "top_logprobs": 21}),
    "response_format": (guided(schema_of(30_000)), guided(schema_of(40_000))),
    "tools": ({"tools": [TOOL] * 1}, {"tools": [TOOL] * 129}),
}


def check(client: httpx.Client, path: str, request: dict[str, Any], limits: dict[str, Any], param: str) -> None:
    """What is allowed is served; what is too much is a 400 that names the field."""
    allowed, too_much = limits[param]
    answer = client.post(path, json=request | allowed)
    assert answer.status_code == 200, answer.text
    answer = client.post(path, json=request | too_much)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert param in (error["param"] or "") or param in error["message"]


@pytest.mark.parametrize("param", LIMITS)
def test_completions(client: httpx.Client, param: str) -> None:
    check(client, "/v1/completions", COMPLETION, LIMITS, param)


@pytest.mark.parametrize("param", CHAT_LIMITS)
def test_chat(client: httpx.Client, param: str) -> None:
    check(client, "/v1/chat/completions", CHAT, CHAT_LIMITS, param)


def test_lengths(client: httpx.Client) -> None:
    """Of one stop string, of a bad word."""
    for field, length in (("stop", 256), ("bad_words", 256)):
        assert client.post("/v1/completions", json=COMPLETION | {field: ["a" * length]}).status_code == 200
        answer = client.post("/v1/completions", json=COMPLETION | {field: ["a" * (length + 1)]})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field


def test_depth(client: httpx.Client) -> None:
    """Of the body, by any of its fields, and of a schema in it; what is far too deep costs no worker either."""
    assert client.post("/v1/chat/completions", json=CHAT | guided(nested(10))).status_code == 200
    for depth in (40, 400):
        assert client.post("/v1/chat/completions", json=CHAT | guided(nested(depth))).status_code == 400
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        for depth in (100, 20_000):
            deep = opening * depth + b"1" + closing * depth
            body = b'{"prompt":"Hi","max_tokens":1,"user":%b}' % deep
            answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400
            assert "64" in answer.json()["error"]["message"]


def test_a_schema_of_a_huge_grammar(client: httpx.Client) -> None:
    """A few bytes that stand for a grammar of millions of symbols are found out before it is built."""
    schema = {"type": "array", "items": {"type": "string", "maxLength": 100_000}, "maxItems": 100_000}
    answer = client.post("/v1/chat/completions", json=CHAT | guided(schema))
    assert answer.status_code in (200, 400)
    regex = client.post("/v1/completions", json=COMPLETION | {"guided_regex": "(a{1,10000}){1,10000}"})
    assert regex.status_code in (200, 400)
    assert client.post("/v1/completions", json=COMPLETION).status_code == 200
