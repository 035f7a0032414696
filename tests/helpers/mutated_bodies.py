"""Bodies of every POST endpoint, right ones and ones that went wrong on the way: values changed, bytes broken."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from tokservice.wire.messages import Route

MODEL = "tiny"  # what the server is to call its model
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SEEDS: list[tuple[Route, dict[str, Any]]] = [
    (
        Route.COMPLETIONS,
        {
            "prompt": ["hello", "world"],
            "model": MODEL,
            "n": 2,
            "max_tokens": 5,
            "stop": ["a", "b"],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "logit_bias": {"5": 1.5},
            "stop_token_ids": [5, 6],
            "temperature": 0.5,
            "truncate_prompt_tokens": 5,
            "seed": 1,
            "metadata": {"a": [1]},
            "echo": False,
        },
    ),
    (Route.COMPLETIONS, {"prompt": [[1, 2], [3]], "top_k": 5, "top_p": 0.5, "min_p": 0.1, "min_tokens": 1}),
    (
        Route.CHAT_COMPLETIONS,
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "5", "tool_call_id": "1"},
                {"role": "assistant", "content": "so"},
            ],
            "add_generation_prompt": False,
            "continue_final_message": True,
            "chat_template_kwargs": {"flag": True},
            "max_completion_tokens": 5,
            "response_format": {"type": "text"},
        },
    ),
    (
        Route.COMPLETIONS,
        {
            "prompt": "hello",
            "echo": True,
            "max_tokens": 0,
            "logprobs": 2,
            "prompt_logprobs": 1,
            "bad_words": ["a", "b c"],
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        },
    ),
    (Route.COMPLETIONS, {"prompt": "a", "guided_choice": ["a", "b"]}),
    (Route.COMPLETIONS, {"prompt": "a", "guided_grammar": 'root ::= [a-z]+ | x\nx ::= "y"'}),
    (Route.COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "[a-z]{2}"}, "n": 2, "best_of": 2}),
    (
        Route.CHAT_COMPLETIONS,
        {
            "messages": [{"role": "user", "content": "x"}],
            "logprobs": True,
            "top_logprobs": 2,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        },
    ),
    *(
        (
            Route.CHAT_COMPLETIONS,
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}}],
                "tool_choice": choice,
                "parallel_tool_calls": False,
            },
        )
        for choice in ("required", "none", {"type": "function", "function": {"name": "f"}})
    ),
    *(
        (
            Route.CHAT_COMPLETIONS,
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "c", "input": "a"}}]},
                ],
                "tools": [
                    {
                        "type": "custom",
                        "custom": {
                            "name": "c",
                            "format": {"type": "grammar", "grammar": {"definition": "[a-z]+", "syntax": "regex"}},
                        },
                    },
                    {"type": "function", "function": {"name": "f"}},
                ],
                "tool_choice": choice,
            },
        )
        for choice in (
            {"type": "custom", "custom": {"name": "c"}},
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "c"}}]},
            },
        )
    ),
    (
        Route.GENERATE,
        {
            "prompt_token_ids": [[1, 2], [3]],
            "sampling_params": {"n": 2, "logprobs": 1, "stop": ["a"], "guided_json": {"type": "object"}},
            "stream": True,
        },
    ),
    (Route.TOKENIZE, {"prompt": "hello", "return_token_strs": True}),
    (Route.TOKENIZE, {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": False}),
    (Route.DETOKENIZE, {"tokens": [1, 2, 3]}),
    (
        Route.RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "reasoning", "id": "1", "summary": [{"type": "summary_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "1", "output": "5"},
                {"type": "message", "role": "assistant", "content": "so", "status": "incomplete"},
            ],
            "instructions": "s",
            "max_output_tokens": 5,
            "metadata": {"a": "b"},
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "tool_choice": "auto",
            "text": {"format": {"type": "text"}},
            "stream": True,
            "top_k": 5,
        },
    ),
    (
        Route.RESPONSES,
        {
            "input": [
                {"role": "user", "content": "x"},
                {"type": "custom_tool_call", "call_id": "1", "name": "c", "input": "a", "async": True},
                {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "5"}]},
            ],
            "tools": [
                {
                    "type": "namespace",
                    "name": "n",
                    "tools": [
                        {"type": "function", "name": "f"},
                        {
                            "type": "custom",
                            "name": "c",
                            "format": {"type": "grammar", "definition": 'start: "a"', "syntax": "lark"},
                        },
                    ],
                },
            ],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "c"}],
            },
        },
    ),
    (
        Route.RESPONSES,
        {
            "input": "x",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
            "reasoning": {"effort": None},
        },
    ),
    (
        Route.MESSAGES,
        {
            "model": MODEL,
            "max_tokens": 5,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "5"}]},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "stop_sequences": ["a"],
            "temperature": 0.5,
            "top_k": 5,
            "top_p": 0.5,
            "stream": True,
        },
    ),
    (Route.MESSAGES, {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}),
    (
        Route.COUNT_TOKENS,
        {
            "model": MODEL,
            "system": "s",
            "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so"}],
            "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        },
    ),
]
NUMBERS = [0, -1, 1, 0.5, 1e300, -1e300, 2**31, 2**63, 2**64, 10**400, 129, True, False, None]
STRINGS = ["", "a", "\x00", "\u2028", "😀", "{{ 7*7 }}", "<|im_end|>", "x" * 300, "assistant", "__class__"]
VALUES: list[Any] = [*NUMBERS, *STRINGS, [], {}, [[]], [None], {"": None}, ["a", 1], {"self": 1}, {"type": "text"}]
BYTES = [b"", b'"', b"\\", b"[", b"}", b"\xff", b"\\ud800", b"9"]


def bodies(seed: int, count: int) -> Iterator[tuple[Route, bytes]]:
    """``count`` bodies, the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        route, body = rng.choice(SEEDS)
        for _ in range(rng.randint(0, 3)):
            body = mutated(body, rng)
        raw = bytearray(json.dumps(body, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass"))
        if rng.random() < 0.3:
            for _ in range(rng.randint(1, 4)):
                place = rng.randrange(len(raw) + 1)
                raw[place : place + rng.randint(0, 2)] = rng.choice(BYTES)
        yield route, bytes(raw)


def mutated(body: Any, rng: random.Random) -> Any:
    """A copy with some value replaced, dropped, wrapped or doubled."""
    if rng.random() < 0.2:
        return rng.choice(VALUES)
    if isinstance(body, dict) and body:
        key = rng.choice(list(body))
        changed = {name: mutated(value, rng) if name == key else value for name, value in body.items()}
        if rng.random() < 0.1:
            changed[rng.choice(STRINGS)] = rng.choice(VALUES)
        if rng.random() < 0.1:
            del changed[key]
        return changed
    if isinstance(body, list) and body:
        place = rng.randrange(len(body))
        return [*body[:place], mutated(body[place], rng), *body[place + rng.choice([0, 1]) :]]
    return rng.choice([rng.choice(VALUES), [body], {"a": body}])
