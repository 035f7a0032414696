"""Thousands of requests of all kinds leave the memory of every process as it was."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.http_client import post
from tests.helpers.server import SIMULATED, Server, running_server
from tests.helpers.tiny_models import COMMON
from tests.helpers.tiny_tokenizers import byte_level, write_model
from tests.helpers.wait import wait_for

CLIENTS = 8
ROUNDS = 6  # memory is read after each; allocators and caches fill up in the first ones
WARM_ROUNDS = 3
MAX_GROWTH_MB = 6  # of one process, over the rounds that follow
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}


def body(number: int) -> tuple[str, dict[str, Any], int]:
    """Path, body and right status of a request; every tenth is of the same kind, none equals another."""
    text = f"one two three {number} " * (number % 7 + 1)
    messages = [{"role": "user", "content": text}]
    short = {"max_tokens": 4 + number % 5, "ignore_eos": True}
    match number % 10:
        case 0 | 1:
            return "/v1/completions", {"prompt": text, **short}, 200
        case 2:
            return "/v1/completions", {"prompt": [text, "b"], "n": 2, "logprobs": 2, "echo": True, **short}, 200
        case 3 | 4:
            return "/v1/chat/completions", {"messages": messages, "stream": True, "stop": ["zzz"], **short}, 200
        case 5:
            return "/v1/chat/completions", {"messages": messages, "tools": [TOOL], "seed": number, **short}, 200
        case 6:
            return "/v1/completions", {"prompt": text, "guided_regex": f"[a-f]{{2}}{number}", "max_tokens": 8}, 200
        case 7:
            return "/v1/completions", {"prompt": text, "stream": True, "max_tokens": 300, "ignore_eos": True}, 200
        case 8:
            return "/v1/completions", {"prompt": text, "top_p": 2 + number}, 400
    return "/v1/completions", {"prompt": text, "presence_penalty": 0.5, "bad_words": ["two"], **short}, 200


def send(server: Server, numbers: range) -> Counter[int]:
    """These requests, one after the other over one connection; streams of 300 tokens are left after the first."""
    client = server.connect()
    wrong: Counter[int] = Counter()
    for number in numbers:
        path, fields, status = body(number)
        client.send(post(json.dumps(fields).encode(), path=path))
        leaves = fields["max_tokens"] == 300 if "max_tokens" in fields else False
        response = client.read_response(head_only=leaves)
        wrong[response.status] += response.status != status
        if leaves:
            client.read_chunk()
        if leaves or not response.keeps_alive:
            client.close()
            client = server.connect()
    client.close()
    return +wrong


def check_memory(server: Server, num_requests: int) -> None:
    pids = server.pids()
    per_client = num_requests // ROUNDS // CLIENTS
    readings: list[dict[tuple[str, int], int]] = []
    with ThreadPoolExecutor(CLIENTS) as clients:
        for done in range(ROUNDS):
            first = [(done * CLIENTS + client) * per_client for client in range(CLIENTS)]
            for wrong in clients.map(lambda start: send(server, range(start, start + per_client)), first):
                assert not wrong
            wait_for(lambda: server.gauge("num_requests_running") == 0, what="nothing runs")
            readings.append({key: psutil.Process(pid).memory_info().rss for key, pid in pids.items()})
    assert server.pids() == pids
    for key in pids:
        megabytes = [reading[key] / 1e6 for reading in readings]
        assert megabytes[-1] - megabytes[WARM_ROUNDS - 1] < MAX_GROWTH_MB, (key, megabytes)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_thousand_requests_leave_memory_flat() -> None:
    with running_server(*SIMULATED, "--set", "simulated.step_ms=1") as server:
        check_memory(server, 20_000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_requests_leave_the_torch_engine_s_memory_flat(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(**COMMON | {"vocab_size": 448})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    write_model(tmp_path, byte_level())
    with running_server("--model", str(tmp_path), "--set", "engine.kv_cache_tokens=8192") as server:
        check_memory(server, 6_000)
