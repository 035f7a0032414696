"""SIGKILL of any worker: clients see a pause, and the very text that an undisturbed run gives."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.helpers.server import SIMULATED, Server, running_server
from tests.helpers.wait import wait_for

NUM_STREAMS = 12
NUM_TOKENS = 120
FATAL_TOKEN = 300  # none that the simulated engine produces by itself
FORCED_BIAS = 100
MAX_RESTARTS = 6  # two beside others, one beside those that were cleared, one alone; two that it was not blamed for
RESTARTS = re.compile(r'^tokservice_process_restarts_total\{role="engine"\} (\S+)$', re.MULTILINE)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    settings = ("--set", "simulated.step_ms=10", "--set", "detokenizer.workers=2", "--set", "engine.processes=2")
    with running_server(*SIMULATED, *settings) as server:
        yield server


def body(index: int, **more: Any) -> dict[str, Any]:
    return {"prompt": f"Tell me about {index}", "max_tokens": NUM_TOKENS, "seed": index, "n": 2, **more}


def plain(server: Server, index: int) -> list[str]:
    answer = httpx.post(f"{server.url}/v1/completions", json=body(index), timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 2 * NUM_TOKENS
    return [choice["text"] for choice in answer.json()["choices"]]


def streamed(server: Server, index: int) -> list[str]:
    texts = ["", ""]
    request = body(index, stream=True, stream_options={"include_usage": True})
    with httpx.stream("POST", f"{server.url}/v1/completions", json=request, timeout=60, trust_env=False) as answer:
        assert answer.status_code == 200
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events.pop() == "[DONE]"
    assert json.loads(events.pop())["usage"]["completion_tokens"] == 2 * NUM_TOKENS
    for event in map(json.loads, events):
        assert "error" not in event, event
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


@pytest.fixture(scope="module")
def right(server: Server) -> list[list[str]]:
    """The texts of an undisturbed run."""
    with ThreadPoolExecutor(NUM_STREAMS) as clients:
        return list(clients.map(lambda index: plain(server, index), range(NUM_STREAMS)))


@pytest.mark.parametrize("victims", ["tokenizer", "detokenizer", "engine", "engine detokenizer", "tokenizer engine"])
def test_the_death_of_workers_is_invisible(server: Server, right: list[list[str]], victims: str) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as clients:
        asks = [streamed if index % 2 else plain for index in range(NUM_STREAMS)]
        answers: list[Future[list[str]]] = [clients.submit(ask, server, index) for index, ask in enumerate(asks)]
        if "tokenizer" not in victims:
            wait_for(lambda: server.gauge("num_requests_running") >= NUM_STREAMS, what="they run")
        for pid in [server.pid(victim, slot) for victim in victims.split() for slot in (0, 1)]:
            os.kill(pid, signal.SIGKILL)  # all at once: no second worker can have begun what the first one had
        texts = [answer.result(timeout=60) for answer in answers]
    assert texts == right
    wait_for(lambda: server.gauge("num_requests_unfinished") == 0, what="nothing is left behind")
    server.wait_until_status("/ready", 200)
    incarnations = {name.rsplit(".", 1)[0] for name in server.sockets() if name.count(".") == 3}
    slots = [identity.rsplit(".", 1)[0] for identity in incarnations]
    assert len(slots) == len(set(slots)), f"sockets of dead processes are left: {incarnations}"


@pytest.mark.parametrize(("engines", "stream"), [(1, True), (2, False)])
def test_poison_fails_alone(right: list[list[str]], engines: int, stream: bool) -> None:
    """A request that ends its engine each time took its batch-mates with it, though they had done nothing: three
    deaths without a new token were counted for all of them."""
    settings = ("simulated.step_ms=10", f"engine.processes={engines}", f"simulated.fatal_token_id={FATAL_TOKEN}")
    poison = {
        "prompt": "Poison",
        "max_tokens": 50,
        "logit_bias": {"5000": FORCED_BIAS, "6000": FORCED_BIAS, str(FATAL_TOKEN): FORCED_BIAS},
        "stream": stream,
    }
    with (
        running_server(*SIMULATED, *(part for name in settings for part in ("--set", name))) as server,
        ThreadPoolExecutor(NUM_STREAMS) as clients,
    ):
        asks = [streamed if index % 2 else plain for index in range(NUM_STREAMS)]
        answers = [clients.submit(ask, server, index) for index, ask in enumerate(asks)]
        wait_for(lambda: server.gauge("num_requests_running") >= NUM_STREAMS, what="they run")
        answer = httpx.post(f"{server.url}/v1/completions", json=poison, timeout=60, trust_env=False)
        texts = [answer.result(timeout=60) for answer in answers]
        assert '"code":"engine_error"' in answer.text
        assert answer.status_code == (200 if stream else 500)
        assert answer.text.endswith("data: [DONE]\n\n") == stream
        assert texts == right
        restarts = sum(float(number) for number in re.findall(RESTARTS, server.metrics()))
        assert 3 <= restarts <= MAX_RESTARTS
        wait_for(lambda: server.gauge("num_requests_unfinished") == 0, what="nothing is left behind")


def test_a_rolling_restart_loses_nothing(server: Server, right: list[list[str]]) -> None:
    """SIGHUP to the launcher: every worker is replaced, one by one, beside running requests."""
    workers = {key for key in server.pids() if key[0] in ("tokenizer", "detokenizer", "engine")}
    before = {server.pid(*key) for key in workers}
    server.process.send_signal(signal.SIGHUP)
    with ThreadPoolExecutor(NUM_STREAMS) as clients:
        while before & set(server.pids().values()):
            assert list(clients.map(lambda index: streamed(server, index), range(NUM_STREAMS))) == right
    server.wait_until_status("/ready", 200)
    assert set(server.pids()) >= workers
    assert not re.search(r"WARNING.*exit code 0", server.log), "what was told to leave is no reason to worry"


def test_the_death_of_the_router_is_an_error_that_clients_can_read(server: Server) -> None:
    with server.begun_stream(body(1, max_tokens=5000)) as lines:
        os.kill(server.pid("router"), signal.SIGKILL)
        rest = [line for line in lines if line]
    assert '"code":"router_restarted"' in rest[-2]
    assert rest[-1] == "data: [DONE]"
    server.wait_until_status("/ready", 200)
    wait_for(lambda: server.gauge("num_requests_running") == 0, what="the engine has dropped the work")
    again = httpx.post(f"{server.url}/v1/completions", json=body(2, max_tokens=3), timeout=30, trust_env=False)
    assert again.status_code == 200


def test_the_death_of_an_api_process_frees_what_it_held(server: Server) -> None:
    with server.begun_stream(body(1, max_tokens=5000)) as lines:
        os.kill(server.pid("api"), signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(lines)

    def answers() -> bool:
        try:
            return httpx.get(f"{server.url}/ready", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    wait_for(answers, 20, "a new API process answers")
    wait_for(lambda: server.gauge("num_requests_running") == 0, what="the engine has dropped the work")
    wait_for(lambda: server.gauge("num_requests_unfinished") == 0, what="the router has forgotten it")


def test_a_stalled_process_is_not_ready_and_a_hanging_one_is_replaced(right: list[list[str]]) -> None:
    """Health counted any traffic as proof of life: sglang#6624."""
    limits = ("runtime.stall_timeout_s=1", "runtime.busy_stall_timeout_s=1", "runtime.hang_timeout_s=4")
    settings = [part for limit in limits for part in ("--set", limit)]
    with running_server(*SIMULATED, "--set", "simulated.step_ms=10", *settings) as server:
        for role in ("router", "detokenizer", "tokenizer", "engine"):
            pid = server.pid(role)
            os.kill(pid, signal.SIGSTOP)
            server.wait_until_status("/ready", 503, timeout_s=3)
            assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
            os.kill(pid, signal.SIGCONT)
            server.wait_until_status("/ready", 200, timeout_s=3)
            assert server.pid(role) == pid
        pid = server.pid("engine")
        with ThreadPoolExecutor(1) as clients:
            answer = clients.submit(streamed, server, 0)
            wait_for(lambda: server.gauge("num_requests_running") == 2, what="it runs")
            os.kill(pid, signal.SIGSTOP)
            assert answer.result(timeout=30) == right[0]
        assert server.pid("engine") != pid
