"""Streams on which nothing is said for a while: official clients skip the comments that keep the connection."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest

from tests.helpers.server import SIMULATED, Server, running_server

MODEL = "smollm2-135m-instruct"
NUM_TOKENS = 2
SETTINGS = ("--set", "api.sse_keepalive_s=0.1", "--set", "simulated.step_ms=2500")  # looked after once a second
KEEPALIVE = ": keep-alive\n\n"
HELLO: Any = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/messages": {"messages": HELLO},
}


def by_http(server: Server, path: str) -> str:
    body = {**BODIES[path], "model": MODEL, "max_tokens": NUM_TOKENS, "stream": True}
    return server.http.post(path, json=body).text


def by_openai(server: Server) -> list[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=90) as client:
        usage: Any = {"include_usage": True}
        options: Any = {"max_tokens": NUM_TOKENS, "stream": True, "stream_options": usage}
        return list(client.chat.completions.create(model=MODEL, messages=HELLO, **options))


def by_anthropic(server: Server) -> Any:
    with (
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=90) as client,
        client.messages.stream(model=MODEL, max_tokens=NUM_TOKENS, messages=HELLO) as stream,
    ):
        return stream.get_final_message()


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[str, Future[Any]]]:
    """To all that ask, at the same time: each token takes long enough for two comments."""
    with running_server(*SIMULATED, *SETTINGS) as server, ThreadPoolExecutor() as clients:
        asked: dict[str, Future[Any]] = {path: clients.submit(by_http, server, path) for path in BODIES}
        yield asked | {"openai": clients.submit(by_openai, server), "anthropic": clients.submit(by_anthropic, server)}


@pytest.mark.parametrize("path", BODIES)
def test_comments_stand_between_events(answers: dict[str, Future[Any]], path: str) -> None:
    """What is left without them is a stream of whole events."""
    text: str = answers[path].result()
    assert text.count(KEEPALIVE) >= NUM_TOKENS - 1
    events = text.replace(KEEPALIVE, "").split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith(("data: ", "event: ")) and "keep-alive" not in event for event in events)


def test_the_openai_client(answers: dict[str, Future[Any]]) -> None:
    chunks = answers["openai"].result()
    assert chunks[-1].usage.completion_tokens == NUM_TOKENS
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_the_anthropic_client(answers: dict[str, Future[Any]]) -> None:
    final = answers["anthropic"].result()
    assert final.usage.output_tokens == NUM_TOKENS
    assert final.stop_reason == "max_tokens"
