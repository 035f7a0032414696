"""API.md against the running system: what it says works gets a 200, what it says is refused a 400 that names it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.helpers.server import ROOT
from tokservice.protocol.openapi import OPERATIONS
from tokservice.protocol.requests import GenerateSampling

TEXT = (ROOT / "API.md").read_text()
MODEL = "smollm2-135m-instruct"
CHAT = [{"role": "user", "content": "One two"}]
OBJECT = {"type": "object"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": OBJECT}}
FIELDS = {
    operation.path: {field.encode_name for field in msgspec.structs.fields(operation.body)}
    for operation in OPERATIONS
    if operation.body
}
BODIES: dict[str, dict[str, Any]] = {  # the least that each path needs
    "/v1/completions": {"prompt": "One two", "max_tokens": 2},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
    "/generate": {"prompt_token_ids": [1, 2]},
    "/tokenize": {"messages": CHAT},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/messages": {"model": MODEL, "messages": CHAT, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": CHAT},
    "/v1/responses": {"input": "One two", "max_output_tokens": 2},
}
# Field -> bodies in which it works; {} stands for the least body, which has it.
WORKS: dict[str, list[dict[str, Any]]] = {
    "prompt": [{"prompt": form} for form in ("x", ["x", "y"], [1, 2], [[1], [2, 3]])],
    "messages": [{"messages": [{"role": "user", "content": form}]} for form in ("x", [{"type": "text", "text": "x"}])],
    "input": [{"input": "x"}, {"input": CHAT}],
    "tokens": [{}],
    "prompt_token_ids": [{"prompt_token_ids": form} for form in ([1, 2], [[1], [2, 3]])],
    "sampling_params": [{"sampling_params": {"max_tokens": 2, "logprobs": 1, "prompt_logprobs": 1, "stop": "x"}}],
    "n": [{"n": 2}],
    "best_of": [{"best_of": 1}, {"n": 2, "best_of": 2}],
    "max_tokens": [{"max_tokens": 3}, {"max_tokens": 10_000_000, "stop_token_ids": list(range(6000, 7024))}],
    "max_completion_tokens": [{"max_completion_tokens": 3, "max_tokens": None}],
    "max_output_tokens": [{"max_output_tokens": 3}],
    "min_tokens": [{"min_tokens": 1}],
    "temperature": [{"temperature": 0}, {"temperature": 1.5}],
    "top_p": [{"top_p": 0.5}],
    "top_k": [{"top_k": 5}, {"top_k": -1}, {"top_k": 10**9}],
    "min_p": [{"min_p": 0.1}],
    "seed": [{"seed": -1}],
    "presence_penalty": [{"presence_penalty": 1}],
    "frequency_penalty": [{"frequency_penalty": -1}],
    "repetition_penalty": [{"repetition_penalty": 1.1}],
    "logit_bias": [{"logit_bias": {"5": -100}}],
    "bad_words": [{"bad_words": ["x"]}],
    "stop": [{"stop": "x"}, {"stop": ["x"] * 16}],
    "stop_sequences": [{"stop_sequences": ["x"]}],
    "stop_token_ids": [{"stop_token_ids": [5]}],
    "include_stop_str_in_output": [{"include_stop_str_in_output": True, "stop": "x"}],
    "ignore_eos": [{"ignore_eos": True}],
    "logprobs": [{"logprobs": 1}],
    "top_logprobs": [{"logprobs": True, "top_logprobs": 20}],
    "prompt_logprobs": [{"prompt_logprobs": 20}],
    "echo": [{"echo": True}, {"echo": True, "max_tokens": 0}],
    "stream": [{"stream": True}],
    "stream_options": [{"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}],
    "tools": [{"tools": [TOOL]}],
    "tool_choice": [
        {"tools": [TOOL], "tool_choice": choice}
        for choice in ("none", "auto", "required", {"type": "function", "function": {"name": "f"}})
    ],
    "parallel_tool_calls": [{"tools": [TOOL], "parallel_tool_calls": False}],
    "response_format": [
        {"response_format": form}
        for form in (
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT}},
        )
    ],
    "structured_outputs": [{"structured_outputs": {"regex": "[a-z]+"}}],
    "guided_json": [{"guided_json": OBJECT}],
    "guided_regex": [{"guided_regex": "[a-z]+"}],
    "guided_choice": [{"guided_choice": ["a", "b"]}],
    "guided_grammar": [{"guided_grammar": 'root ::= "a"'}],
    "add_generation_prompt": [{"add_generation_prompt": False}],
    "continue_final_message": [
        {
            "messages": [*CHAT, {"role": "assistant", "content": "so"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        }
    ],
    "chat_template_kwargs": [{"chat_template_kwargs": {"x": 1}}],
    "add_special_tokens": [{"add_special_tokens": False}],
    "skip_special_tokens": [{"skip_special_tokens": False}],
    "spaces_between_special_tokens": [{"spaces_between_special_tokens": value} for value in (True, False)],
    "truncate_prompt_tokens": [{"truncate_prompt_tokens": 1}, {"truncate_prompt_tokens": -1}],
    "priority": [{"priority": -1}],
    "return_token_ids": [{"return_token_ids": True}],
    "return_tokens_as_token_ids": [{"return_tokens_as_token_ids": True}],
    "return_token_strs": [{"return_token_strs": True}],
    "system": [{"system": "x"}, {"system": [{"type": "text", "text": "x"}]}],
    "instructions": [{"instructions": "x"}],
    "text": [{"text": {"format": {"type": "json_object"}}}],
    "include": [{"include": ["message.output_text.logprobs"]}],
    "thinking": [{"thinking": {"type": kind}} for kind in ("adaptive", "disabled")],
    "output_config": [{"output_config": {"format": {"type": "json_schema", "schema": OBJECT}}}],
    "output_format": [{"output_format": {"type": "json_schema", "schema": OBJECT}}],
}
# Where a path has its own form of a field.
OWN: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("/v1/chat/completions", "logprobs"): [{"logprobs": True}],
    ("/v1/chat/completions", "messages"): [
        {"messages": [{"role": role, "content": "x", **({"tool_call_id": "1"} if role == "tool" else {})}, *CHAT]}
        for role in ("system", "developer", "user", "assistant", "tool")
    ],
    ("/tokenize", "prompt"): [{"prompt": "x", "messages": None}],
    ("/v1/messages", "max_tokens"): [{"max_tokens": 3}],
    ("/v1/messages", "tools"): [{"tools": [{"name": "f", "input_schema": OBJECT}]}],
    ("/v1/messages", "tool_choice"): [
        {"tools": [{"name": "f", "input_schema": OBJECT}], "tool_choice": choice}
        for choice in ({"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "f"})
    ],
    ("/v1/responses", "tools"): [{"tools": [{"type": "function", "name": "f", "parameters": OBJECT}]}],
    ("/v1/responses", "tool_choice"): [
        {"tools": [{"type": "function", "name": "f", "parameters": OBJECT}], "tool_choice": choice}
        for choice in ("none", "auto", "required", {"type": "function", "name": "f"})
    ],
    ("/v1/responses", "parallel_tool_calls"): [
        {"tools": [{"type": "function", "name": "f", "parameters": OBJECT}], "parallel_tool_calls": False}
    ],
    ("/v1/responses", "top_logprobs"): [{"include": ["message.output_text.logprobs"], "top_logprobs": 2}],
}
for name in ("tools", "tool_choice"):
    OWN["/v1/messages/count_tokens", name] = OWN["/v1/messages", name]
REFUSED: dict[str, Any] = {  # "x" where nothing is named here
    "length_penalty": 2,
    "use_beam_search": True,
    "allowed_token_ids": [1],
    "functions": [{"name": "f"}],
    "documents": [{"text": "x"}],
    "audio": {"voice": "x"},
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {"x": 1},
    "store": True,
    "background": True,
    "modalities": ["audio"],
    "output_config": {"task_budget": {"type": "tokens", "total": 5}},
    "mcp_servers": [{"name": "x"}],
    "echo": True,
    "prompt": {"id": "x"},
    "prompt_cache_options": {"x": 1},
    "max_tool_calls": 1,
    "include": ["file_search_call.results"],
    "text": {"verbosity": "low"},
    "reasoning": {"summary": "detailed"},
}


def rows() -> Iterator[tuple[list[str], list[str], str]]:
    """(paths, names, what is said) of each row of each table of fields."""
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE):
        title, _, rest = section.partition("\n")
        if not title.startswith("Fields of"):
            continue
        paths = re.findall(r"`(/[\w/]+)`", title) or ["/v1/completions", "/v1/chat/completions"]
        for line in rest.splitlines():
            cells = line.strip("| ").split(" | ")
            if line.startswith("| ") and "`" in cells[0]:
                fields, _, _ = cells[0].partition("`: ")  # then come its forms
                names = re.findall(r"`([a-z_]+)[^`]*`?", fields)
                here = re.findall(r"of `(/[\w/]+)`", cells[0])
                yield here or paths, names, cells[1]


def expectations() -> list[tuple[str, str, bool]]:
    """(path, field, whether it works)."""
    found = {}
    for paths, names, said in rows():
        if said.startswith(("works", "400")):
            works = said.startswith("works")
            found.update({(path, name, works): 0 for path in paths for name in names if name in FIELDS[path]})
    return list(found)


def test_every_field_is_in_a_table() -> None:
    """Of completions its sampling fields, which hold for /generate and /v1/responses too."""
    common = {field.encode_name for field in msgspec.structs.fields(GenerateSampling)}
    for path, fields in FIELDS.items():
        told = {name for paths, names, _ in rows() if path in paths for name in names}
        bookkeeping = {"model", "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
        others = set() if path.endswith("completions") else common | {"stream_options"}
        assert fields - told - bookkeeping - others == set(), path


@pytest.mark.parametrize(("path", "name", "works"), expectations())
def test_a_field_does_what_is_said(client: httpx.Client, path: str, name: str, works: bool) -> None:
    if not works:
        value = REFUSED.get(name, "x")
        answer = client.post(path, json=BODIES[path] | {name: value})
        assert answer.status_code == 400
        named = [name, *value] if isinstance(value, dict) else [name]
        assert any(one in answer.json()["error"]["message"] for one in named)
        return
    for more in OWN.get((path, name)) or WORKS[name]:
        answer = client.post(path, json=BODIES[path] | more)
        assert answer.status_code == 200, answer.text


def endpoints() -> list[tuple[str, str, str]]:
    """(method, path, what is said)."""
    found = []
    for line in TEXT.partition("## Endpoints")[2].partition("\n## ")[0].splitlines():
        cells = line.strip("| ").split(" | ")
        if method := re.match(r"`(GET|POST) /", cells[0]):
            paths = re.findall(r"[ `](/[\w./{}]+)`", cells[0])
            found += [(method[1], path, cells[1]) for path in paths]
    return found


@pytest.mark.parametrize(("method", "path", "said"), endpoints())
def test_an_endpoint_is_what_is_said(client: httpx.Client, method: str, path: str, said: str) -> None:
    answer = client.request(method, path.replace("{id}", MODEL), json={} if method == "POST" else None)
    if said.startswith("404"):
        assert answer.status_code == 404
    else:
        assert said == "works"
        assert answer.status_code == (400 if method == "POST" else 200)


def test_every_endpoint_is_in_the_table() -> None:
    told = {(method, path.replace("{id}", "{model}")) for method, path, said in endpoints() if said == "works"}
    assert told == {(operation.method.upper(), operation.path) for operation in OPERATIONS}
