"""SIGKILL of any worker: clients see a pause, and the very text that an undisturbed run gives."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.helpers.server import SIMULATED, Server, running_server
from tests.helpers.wait import wait_for

NUM_STREAMS = 12
NUM_TOKENS = 90
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
    answer = server.http.post("/v1/completions", json=body(index))
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 2 * NUM_TOKENS
    return [choice["text"] for choice in answer.json()["choices"]]


def streamed(server: Server, index: int, has_begun: threading.Event | None = None) -> list[str]:
    texts = ["", ""]
    request = body(index, stream=True, stream_options={"include_usage": True})
    events = []
    with server.http.stream("POST", "/v1/completions", json=request) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
            if has_begun is not None:
                has_begun.set()
    assert events.pop() == "[DONE]"
    assert json.loads(events.pop())["usage"]["completion_tokens"] == 2 * NUM_TOKENS
    for event in map(json.loads, events):
        assert "error" not in event, event
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


def begin_all(server: Server, clients: ThreadPoolExecutor, *, wait: bool = True) -> list[Future[list[str]]]:
    """Plain and streamed requests in turn; with ``wait`` all streams have begun."""
    begun = [threading.Event() for _ in range(NUM_STREAMS // 2)]
    answers = []
    for number, has_begun in enumerate(begun):
        answers.append(clients.submit(plain, server, 2 * number))
        answers.append(clients.submit(streamed, server, 2 * number + 1, has_begun))
    assert all(has_begun.wait(90) for has_begun in begun if wait)
    return answers


@pytest.fixture(scope="module")
def right(server: Server) -> list[list[str]]:
    """The texts of an undisturbed run."""
    with ThreadPoolExecutor(NUM_STREAMS) as clients:
        return list(clients.map(lambda index: plain(server, index), range(NUM_STREAMS)))


@pytest.mark.parametrize("victims", ["tokenizer", "detokenizer", "engine", "engine detokenizer", "tokenizer engine"])
def test_the_death_of_workers_is_invisible(server: Server, right: list[list[str]], victims: str) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as clients:
        answers = begin_all(server, clients, wait="tokenizer" not in victims)
        for pid in [server.pid(victim, slot) for victim in victims.split() for slot in (0, 1)]:
            os.kill(pid, signal.SIGKILL)  # all at once: no second worker can have begun what the first one had
        texts = [answer.result(timeout=90) for answer in answers]
    assert texts == right
    wait_for(lambda: server.gauge("num_requests_unfinished") == 0, what="nothing is left behind")
    server.wait_until_status("/ready", 200)
    incarnations = {name.rsplit(".", 1)[0] for name in server.sockets() if name.count(".") == 3}
    slots = [identity.rsplit(".", 1)[0] for identity in incarnations]
    assert len(slots) == len(set(slots)), f"sockets of dead processes are left: {incarnations}"


def test_the_death_of_detokenizers_in_the_middle_of_a_report_is_invisible(server: Server) -> None:
    """It is written in slices, between which nothing of it is told."""
    asked = {"prompt": list(range(1000, 9000)), "max_tokens": 3, "seed": 1, "prompt_logprobs": 20}
    right = server.http.post("/v1/completions", json=asked).json()["choices"]
    with ThreadPoolExecutor() as clients:
        answer = clients.submit(server.http.post, "/v1/completions", json=asked)
        wait_for(lambda: is_at_work(server, "detokenizer"), what="the report is being written")
        for slot in (0, 1):
            os.kill(server.pid("detokenizer", slot), signal.SIGKILL)
        assert answer.result(timeout=90).json()["choices"] == right
    assert len(right[0]["prompt_logprobs"]) == 8000
    server.wait_until_status("/ready", 200)


def is_at_work(server: Server, role: str) -> bool:
    """Whether one of them has marked what it works on."""
    return any(path.read_bytes()[:1].strip(b"\0") for path in server.run_dir.glob(f"{role}.*.working"))


def num_restarts(server: Server) -> float:
    return sum(float(number) for number in re.findall(RESTARTS, server.metrics()))


@pytest.mark.parametrize(("engines", "stream"), [(1, True), pytest.param(2, False, marks=pytest.mark.slow)])
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
        answers = begin_all(server, clients)
        answer = server.http.post("/v1/completions", json=poison)
        texts = [answer.result(timeout=90) for answer in answers]
        assert '"code":"engine_error"' in answer.text
        assert answer.status_code == (200 if stream else 500)
        assert answer.text.endswith("data: [DONE]\n\n") == stream
        assert texts == right
        wait_for(lambda: num_restarts(server) >= 3, what="all deaths are counted")
        assert num_restarts(server) <= MAX_RESTARTS
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
    again = body(2, max_tokens=3)
    wait_for(lambda: server.http.post("/v1/completions", json=again).status_code == 200, what="it serves again")


def test_the_death_of_an_api_process_frees_what_it_held(server: Server) -> None:
    with server.begun_stream(body(1, max_tokens=5000)) as lines:
        os.kill(server.pid("api"), signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(lines)

    def answers() -> bool:
        try:
            return server.http.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    wait_for(answers, what="a new API process answers")
    wait_for(lambda: server.gauge("num_requests_running") == 0, what="the engine has dropped the work")
    wait_for(lambda: server.gauge("num_requests_unfinished") == 0, what="the router has forgotten it")


def test_a_stalled_process_is_not_ready(small: tuple[str, ...]) -> None:
    """Health counted any traffic as proof of life: sglang#6624. Of those that have stalled one is named."""
    limits = ("--set", "runtime.stall_timeout_s=1", "--set", "runtime.busy_stall_timeout_s=1")
    with running_server(*small, *limits) as server:
        pids = server.pids()
        stalled = {f"{role} 0 has stalled": pids[role, 0] for role in ("router", "engine", "tokenizer", "detokenizer")}
        for pid in stalled.values():
            os.kill(pid, signal.SIGSTOP)
        while stalled:
            named = wait_for(lambda: stalled.keys() & {server.why_not_ready()}, what="one more is noticed")
            assert server.http.get("/health").status_code == 200
            os.kill(stalled.pop(named.pop()), signal.SIGCONT)
        server.wait_until_status("/ready", 200)
        assert server.pids() == pids


def test_a_hanging_process_is_replaced(right: list[list[str]]) -> None:
    settings = ("--set", "simulated.step_ms=10", "--set", "runtime.hang_timeout_s=4")
    with running_server(*SIMULATED, *settings) as server, ThreadPoolExecutor(1) as clients:
        pid, has_begun = server.pid("engine"), threading.Event()
        answer = clients.submit(streamed, server, 0, has_begun)
        assert has_begun.wait(90)
        os.kill(pid, signal.SIGSTOP)
        assert answer.result(timeout=90) == right[0]
        assert server.pid("engine") != pid
