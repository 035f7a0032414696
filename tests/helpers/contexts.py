"""Contexts of requests, as a tokenizer worker sends them to a detokenizer."""

from __future__ import annotations

from typing import Any

from tokservice.protocol import context as contexts
from tokservice.protocol.context import Context
from tokservice.wire.messages import Route


def context(**fields: Any) -> bytes:
    """The frame of a plain chat stream, or of what ``fields`` make of it."""
    values: dict[str, Any] = {
        "route": Route.CHAT_COMPLETIONS,
        "response_id": "chatcmpl-1",
        "created": 1700000000,
        "model": "tiny",
        "n": 1,
        "num_prompt_tokens": (5,),
        "stream": True,
        "include_usage": False,
        "continuous_usage": False,
        "stop": (),
        "include_stop": False,
        "skip_special_tokens": True,
        "min_tokens": 0,
        "bare_prompts": (),
    }
    return contexts.encode(Context(**values | fields))
