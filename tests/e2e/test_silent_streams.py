"""Streams on which nothing is said for a while: official clients skip the comments that keep the connection."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest

from tests.helpers.server import SIMULATED, Server, running_server

MODEL = "smollm2-135m-instruct"
NUM_TOKENS = 2
SETTINGS = ("--set", "api.sse_keepalive_s=0.1", "--set", "simulated.step_ms=1500")  # looked after once a second
KEEPALIVE = ": keep-alive\n\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Each token takes long enough for a comment or two."""
    with running_server(*SIMULATED, *SETTINGS) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
)
def test_comments_stand_between_events(server: Server, path: str, body: dict[str, object]) -> None:
    """What is left without them is a stream of whole events."""
    body = {**body, "model": MODEL, "max_tokens": NUM_TOKENS, "stream": True}
    with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=60, trust_env=False) as stream:
        text = stream.read().decode()
    assert text.count(KEEPALIVE) >= NUM_TOKENS - 1
    events = text.replace(KEEPALIVE, "").split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith(("data: ", "event: ")) and "keep-alive" not in event for event in events)


def test_the_openai_client(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Hello"}],
                max_tokens=NUM_TOKENS,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == NUM_TOKENS
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_the_anthropic_client(server: Server) -> None:
    with (
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client,
        client.messages.stream(
            model=MODEL,
            max_tokens=NUM_TOKENS,
            messages=[{"role": "user", "content": "Hello"}],
        ) as stream,
    ):
        final = stream.get_final_message()
    assert final.usage.output_tokens == NUM_TOKENS
    assert final.stop_reason == "max_tokens"
