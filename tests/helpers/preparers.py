"""Request preparation with a tiny model: how tests make it, and what they ask of it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import tiny_tokenizers
from tokservice.runtime.config import TokenizerConfig
from tokservice.tokenizer.prepare import Answer, Prepared, Preparer
from tokservice.wire.errors import RequestError
from tokservice.wire.messages import EngineLimits, Route

TOKENIZER = tiny_tokenizers.byte_level()
VOCAB_SIZE = TOKENIZER.get_vocab_size() + 10  # ten padding rows
LIMITS = EngineLimits(max_model_len=64, vocab_size=VOCAB_SIZE, kv_cache_tokens=1000, eos_token_ids=(2,))
NOW = 1700000000.9
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
PROMPT = {"prompt": "hello world"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def counting_bits(num_bits: int) -> int:
    return (1 << num_bits) - 1


def make(folder: Path, tokenizer: Any = TOKENIZER, settings: TokenizerConfig | None = None, **files: Any) -> Preparer:
    tiny_tokenizers.write_model(folder, tokenizer, **files)
    preparer = Preparer(
        model_dir=folder,
        model_name="tiny",
        chat_template_file="",
        settings=settings or TokenizerConfig(),
        randbits=counting_bits,
    )
    preparer.set_limits(LIMITS)
    return preparer


def prepared(preparer: Preparer, **body: Any) -> Prepared:
    route = Route.CHAT_COMPLETIONS if "messages" in body else Route.COMPLETIONS
    result = preparer.prepare(route, [json.dumps(body).encode()], NOW)
    assert isinstance(result, Prepared)
    return result


def answer(preparer: Preparer, route: Route, **body: Any) -> Any:
    result = preparer.prepare(route, [json.dumps(body).encode()], NOW)
    assert isinstance(result, Answer)
    return json.loads(result.body)


def refused(preparer: Preparer, body: dict[str, Any] | bytes, route: Route | None = None) -> RequestError:
    if isinstance(body, dict):
        route = route or (Route.CHAT_COMPLETIONS if "messages" in body else Route.COMPLETIONS)
        body = json.dumps(body).encode()
    with pytest.raises(RequestError) as caught:
        preparer.prepare(route or Route.COMPLETIONS, [body], NOW)
    assert 400 <= caught.value.status < 500
    return caught.value


def ids(result: Prepared) -> list[list[int]]:
    return [list(struct.unpack(f"<{len(prompt) // 4}I", prompt)) for prompt in result.prompts]
