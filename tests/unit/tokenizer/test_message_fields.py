"""What messages hold beside role and content."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.helpers.tiny_tokenizers import CHAT_TEMPLATE
from tokservice.protocol.requests import Message
from tokservice.tokenizer import conversation
from tokservice.tokenizer.chat_template import ChatTemplate

CHATML = ChatTemplate(CHAT_TEMPLATE, {})
THOUGHTS = ChatTemplate("{% for m in messages %}[{{ m.reasoning_content }}]{% endfor %}", {})


def render(template: ChatTemplate, **message: Any) -> str:
    parsed = msgspec.json.decode(json.dumps([message]).encode(), type=list[Message])
    return conversation.render(
        template,
        parsed,
        add_generation_prompt=False,
        continue_final_message=None,
        variables=None,
        now=0.0,
        mark="<mark>",
    )


@pytest.mark.parametrize("hint", ["cache_control", "prompt_cache_breakpoint"])
def test_hints_about_caching_are_the_clients_own(hint: str) -> None:
    part = {"type": "text", "text": "hi", hint: {"type": "ephemeral"}}
    assert render(CHATML, role="user", content=[part]) == render(CHATML, role="user", content="hi")


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"reasoning_content": "hm"}, "[hm]"),
        ({"reasoning": "hm"}, "[hm]"),
        ({"reasoning": "no", "reasoning_content": "hm"}, "[hm]"),
        ({"reasoning": None, "reasoning_content": None}, "[]"),
    ],
)
def test_thoughts_have_two_names(fields: dict[str, Any], shown: str) -> None:
    """Copies of vLLM's answers were 400s."""
    assert render(THOUGHTS, role="assistant", content="so", **fields) == shown
