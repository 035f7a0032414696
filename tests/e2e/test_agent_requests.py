"""What coding agents send, by the official clients against the default model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.helpers.server import Server

pytestmark = pytest.mark.timeout(300)

MODEL = "smollm2-135m-instruct"
EPHEMERAL = {"type": "ephemeral"}
READ: dict[str, Any] = {
    "name": "read",
    "type": "custom",
    "description": "Reads a file",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"type": "string", "maxLength": 12}},
        "required": ["path"],
        "additionalProperties": False,
    },
    "input_examples": [{"path": "a.py"}],
    "strict": True,
    "eager_input_streaming": True,
    "cache_control": EPHEMERAL,
}
# The shape of Claude Code's requests in the second turn of a session.
AGENT: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 16,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.240; cc_entrypoint=cli; cch=1f3a9;"},
        {"type": "text", "text": "You help with code.", "cache_control": {**EPHEMERAL, "ttl": "1h"}},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "What is in a.py?", "cache_control": EPHEMERAL}]},
        {"role": "system", "content": "There are no other agents."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": "abc"},
                {"type": "redacted_thinking", "data": "Eu8="},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a.py"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "is_error": False,
                    "content": [{"type": "text", "text": "x = 1"}],
                    "cache_control": EPHEMERAL,
                }
            ],
        },
    ],
    "tools": [READ],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "adaptive", "display": "summarized"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "user_1"},
    "service_tier": "auto",
    "betas": ["claude-code-20250219", "context-management-2025-06-27"],
}


@pytest.fixture
def agent(default_model: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=default_model.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_the_request_of_an_agent_is_served_plain_and_streamed(agent: anthropic.Anthropic) -> None:
    """Each of thinking, output_config and context_management was a 400: no request of such an agent was served."""
    plain = agent.beta.messages.create(**AGENT)
    assert plain.usage.output_tokens > 0
    assert plain.usage.service_tier == "standard"
    assert plain.usage.output_tokens_details is not None
    assert plain.usage.output_tokens_details.thinking_tokens == 0
    assert plain.context_management is not None
    assert plain.context_management.applied_edits == []
    assert plain._request_id
    with agent.beta.messages.stream(**AGENT) as stream:
        final = stream.get_final_message()
    assert {plain.stop_reason, final.stop_reason} <= {"end_turn", "max_tokens"}  # no temperature: texts differ
    assert final.context_management == plain.context_management
    counted = {key: value for key, value in AGENT.items() if key not in ("max_tokens", "metadata", "service_tier")}
    tokens = agent.beta.messages.count_tokens(**counted)
    assert tokens.context_management is not None
    assert tokens.input_tokens == tokens.context_management.original_input_tokens
    assert tokens.input_tokens == plain.usage.input_tokens + (plain.usage.cache_read_input_tokens or 0)


def test_the_next_request_finds_the_prompt_in_the_cache(agent: anthropic.Anthropic) -> None:
    """The line that counts requests stands before all else, and no prefix was ever found again."""
    agent.beta.messages.create(**AGENT)
    first, *rest = AGENT["system"]
    system = [{**first, "text": first["text"].replace("1f3a9", "0aaa9")}, *rest]
    again = agent.beta.messages.create(**AGENT | {"system": system})
    assert (again.usage.cache_read_input_tokens or 0) > again.usage.input_tokens


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 2048}, {"type": "disabled"}])
def test_a_schema_binds_the_text(agent: anthropic.Anthropic, thinking: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    question: Any = {
        "model": MODEL,
        "max_tokens": 40,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "thinking": thinking,
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": schema}},
    }
    message = agent.messages.create(**question)
    (block,) = message.content
    assert block.type == "text"
    assert json.loads(block.text)["city"] in ("Paris", "Rome")


def test_the_model_is_listed_in_the_clients_own_form(agent: anthropic.Anthropic) -> None:
    (model,) = agent.models.list()
    assert (model.id, model.display_name, model.type, model.lifecycle) == (MODEL, MODEL, "model", "active")
    assert agent.models.retrieve(MODEL) == model


def test_a_tool_in_a_namespace_is_called_by_its_own_name(default_model: Server) -> None:
    function = {"type": "function", "name": "read", "parameters": READ["input_schema"], "strict": False}
    tools: Any = [{"type": "namespace", "name": "files", "description": "of the project", "tools": [function]}]
    question: Any = {"model": MODEL, "input": "Read a.py.", "tools": tools, "temperature": 0}
    with openai.OpenAI(base_url=f"{default_model.url}/v1", api_key="none", max_retries=0, timeout=120) as codex:
        response = codex.responses.create(**question, tool_choice="required", parallel_tool_calls=False)
        (call,) = response.output
        assert call.type == "function_call"
        assert (call.name, call.namespace) == ("read", "files")
        assert response.to_dict()["tools"] == [{**tools[0], "tools": [{**function, "description": None}]}]
        done = {"type": "function_call_output", "call_id": call.call_id, "output": "x = 1"}
        items: Any = [{"role": "user", "content": "Read a.py."}, call, done]
        again = codex.responses.create(**question | {"input": items, "max_output_tokens": 3})
        assert again.usage is not None
        assert again.usage.output_tokens > 0


class City(BaseModel):
    """The form of an answer."""

    capital: bool


def test_the_client_parses_an_answer_of_its_own_type(agent: anthropic.Anthropic) -> None:
    question: Any = [{"role": "user", "content": "Is Paris a capital?"}]
    message = agent.messages.parse(model=MODEL, max_tokens=40, messages=question, output_format=City)
    assert isinstance(message.parsed_output, City)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management"),
        ({"mcp_servers": [{"type": "url", "name": "x", "url": "https://x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"inference_geo": "us"}, "inference_geo"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "budget_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{**READ, "defer_loading": True}]}, "defer_loading"),
    ],
)
def test_what_no_server_of_one_model_can_do_is_named(agent: anthropic.Anthropic, change: Any, named: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        agent.beta.messages.create(**AGENT | change)
    assert named in str(caught.value)
    assert caught.value.request_id
