"""``litellm`` against the default model, by each of the providers that people configure for such a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.server import Server

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("loopback_only"),
    pytest.mark.filterwarnings("ignore"),  # its own: of types that it declares, and of sockets that it leaves open
]

MODEL = "smollm2-135m-instruct"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 12}},
    "required": ["word"],
    "additionalProperties": False,
}
LOOK_UP = {"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "look_up"}}


@pytest.fixture(scope="module", autouse=True)
def _close_its_loop() -> Iterator[None]:
    """The one that the package opens when it is imported, which some later test would be blamed for."""
    yield
    asyncio.get_event_loop_policy().get_event_loop().close()
    asyncio.set_event_loop(None)


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The package, which takes its list of prices from its own folder instead of the network."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    litellm.suppress_debug_info = True
    yield litellm
    for client in litellm.in_memory_llm_clients_cache.cache_dict.values():
        client.close()
    litellm.in_memory_llm_clients_cache.flush_cache()


@pytest.fixture(params=["openai", "hosted_vllm", "anthropic"])
def options(request: pytest.FixtureRequest, default_model: Server) -> dict[str, Any]:
    """Of every call: which provider, where."""
    base = default_model.url if request.param == "anthropic" else f"{default_model.url}/v1"
    return {"model": f"{request.param}/{MODEL}", "api_base": base, "api_key": "none", "num_retries": 0, "timeout": 120}


def test_chat_streamed_and_plain_say_the_same(litellm: ModuleType, options: dict[str, Any]) -> None:
    asked = options | {"messages": FRANCE, "temperature": 0, "max_tokens": 24}
    plain = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks)  # its own joining
    for answer in (plain, whole):
        (choice,) = answer.choices
        assert "Paris" in choice.message.content
        assert choice.message.content == plain.choices[0].message.content
        assert choice.finish_reason == plain.choices[0].finish_reason
        assert answer.usage.completion_tokens == plain.usage.completion_tokens
        assert answer.usage.prompt_tokens == plain.usage.prompt_tokens
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) > 1


def test_a_demanded_call_streamed_and_plain(litellm: ModuleType, options: dict[str, Any]) -> None:
    asked = options | {"messages": FRANCE, "temperature": 0, "max_tokens": 60, "tools": [LOOK_UP], "tool_choice": NAMED}
    litellm.completion(**asked)  # both that follow find the prompt in the prefix cache: near-ties end alike
    plain = litellm.completion(**asked)
    whole = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    (call,), (streamed,) = (answer.choices[0].message.tool_calls for answer in (plain, whole))
    assert call.function.name == streamed.function.name == "look_up"
    assert call.function.arguments == streamed.function.arguments
    if options["model"].startswith(
        "openai/"
    ):  # the other one leaves additionalProperties out, and arguments may not end
        assert json.loads(call.function.arguments).keys() == {"word"}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_texts_streamed_and_plain_say_the_same(litellm: ModuleType, default_model: Server, provider: str) -> None:
    asked: dict[str, Any] = {
        "model": f"{provider}/{MODEL}",
        "api_base": f"{default_model.url}/v1",
        "api_key": "none",
        "prompt": "Once upon a time",
        "temperature": 0,
        "max_tokens": 12,
    }
    plain = litellm.text_completion(**asked).choices[0].text
    assert plain
    assert "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**asked, stream=True)) == plain


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_own(litellm: ModuleType, default_model: Server, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "api_base": f"{default_model.url}/v1",
        "api_key": "none",
        "max_retries": 0,
        "stream": stream,
    }
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asked, messages=FRANCE, temperature=-1)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked, messages=[{"role": "user", "content": "word " * 9000}])
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**asked | {"model": "openai/no-such-model"}, messages=FRANCE)
