"""Clients that leave the whole system at any stage of their request: the work stops, and nothing stays."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.http_client import RawClient, post, post_head
from tests.helpers.server import SIMULATED, Server, running_server
from tests.helpers.wait import wait_for

NUM_CLIENTS = 16
REQUESTS_EACH = 13
GONE_S = 30.0  # until the work has stopped: a fraction of what it would take
MAX_LOG_LINES = 30  # of hundreds of clients that leave


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One request at a time in the engine, the longest prompt for most of a minute."""
    settings = ("engine.max_num_seqs=1", "simulated.step_ms=5", "simulated.prefill_tokens_per_s=20000")
    with running_server(*SIMULATED, *(part for name in settings for part in ("--set", name))) as running:
        yield running


def body(prompt: str | list[int] = "Hello", *, max_tokens: int = 100_000, stream: bool = True) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}).encode()


def is_idle(server: Server) -> bool:
    names = ("num_requests_unfinished", "num_requests_running", "num_requests_waiting", "unfinished_bytes")
    return not any(server.gauge(name) for name in names)


def uploading(server: Server, client: RawClient) -> None:
    client.send(post_head("Content-Length: 1000000") + b"x" * 100_000)
    wait_for(lambda: server.gauge("unfinished_bytes") >= 1_000_000, what="it is admitted")


def decoding(server: Server, client: RawClient) -> None:
    client.send(post(body())).read_head()
    wait_for(lambda: server.gauge("num_requests_running") == 1, what="it runs")


def in_prefill(server: Server, client: RawClient) -> None:
    """For fifty seconds."""
    client.send(post(body([5] * 1_000_000, max_tokens=1)))
    wait_for(lambda: server.gauge("num_requests_running") == 1, what="it runs")


def before_its_first_token(server: Server, client: RawClient) -> None:
    """Plain: its client has got nothing at all."""
    client.send(post(body(stream=False)))
    wait_for(lambda: server.gauge("num_requests_running") == 1, what="it runs")


@pytest.mark.parametrize("reach", [uploading, decoding, in_prefill, before_its_first_token])
def test_gone_at_a_stage(server: Server, reach: Callable[[Server, RawClient], None]) -> None:
    with server.connect() as client:
        reach(server, client)
    wait_for(lambda: is_idle(server), GONE_S, "the work has stopped")


def test_gone_while_it_waits_in_the_engine(server: Server) -> None:
    """An abort that found the request in no queue of running ones was lost: sglang#36876."""
    with server.connect() as first:
        decoding(server, first)
        with server.connect() as second:
            second.send(post(body()))
            wait_for(lambda: server.gauge("num_requests_waiting") == 1, what="it waits")
        wait_for(lambda: server.gauge("num_requests_waiting") == 0, GONE_S, "it is out of the queue")
        assert server.gauge("num_requests_running") == 1
        assert first.read_chunk().startswith(b"data: ")
    wait_for(lambda: is_idle(server), GONE_S, "the work has stopped")


def test_gone_before_a_tokenizer_has_looked_at_it(server: Server) -> None:
    """And what the tokenizers had been sent begins nothing when they get to it."""
    before = server.gauge("engine_generation_tokens_total")
    pids = [server.pid("tokenizer", slot) for slot in (0, 1)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        with server.connect() as client:
            client.send(post(body()))
            wait_for(lambda: server.gauge("num_requests_unfinished") == 1, what="the router has it")
        wait_for(lambda: server.gauge("unfinished_bytes") == 0, what="the router knows that the client has gone")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    wait_for(lambda: is_idle(server), GONE_S, "nothing is left")
    assert server.gauge("engine_generation_tokens_total") - before < 100


def test_gone_before_the_engine_has_read_of_it(server: Server) -> None:
    """The abort and the request wait in two inboxes of the engine: whichever it reads first, it runs nothing."""
    prompts, tokens = server.gauge("prompt_tokens_total"), server.gauge("engine_generation_tokens_total")
    pid = server.pid("engine")
    os.kill(pid, signal.SIGSTOP)
    try:
        with server.connect() as client:
            client.send(post(body())).read_head()
            wait_for(lambda: server.gauge("prompt_tokens_total") > prompts, what="it is on its way to the engine")
        wait_for(lambda: server.gauge("unfinished_bytes") == 0, what="the router knows that the client has gone")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: is_idle(server), GONE_S, "nothing is left")
    assert server.gauge("engine_generation_tokens_total") - tokens < 100


def test_hundreds_of_clients_leave_at_any_moment(server: Server) -> None:
    """The record of a request went before its abort, so that the engine decoded on for nobody and every further token
    was a line in the log: sglang#36333. A disconnect took a process with it: sglang#39216."""
    pids = server.pids()
    num_lines = server.log.count("\n")

    def ask(number: int) -> None:
        rng = random.Random(number)
        for _ in range(REQUESTS_EACH):
            prompt, max_tokens = "Hello " * rng.choice((1, 10, 2000)), rng.choice((1, 5, 60))
            request = post(body(prompt, max_tokens=max_tokens, stream=rng.random() < 0.7), "Connection: close")
            with server.connect() as client:
                stage = rng.choice(("head", "body", "sent", "one read", "three reads"))
                if stage == "head":
                    client.send(request[: rng.randrange(1, 60)])
                elif stage == "body":
                    client.send(request[: rng.randrange(len(request) // 2, len(request))])
                else:
                    client.send(request)
                    for _ in range({"sent": 0, "one read": 1, "three reads": 3}[stage]):
                        client.socket.recv(rng.choice((1, 100, 10_000)))
                if rng.random() < 0.5:  # with linger 0, closing is a reset
                    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        list(clients.map(ask, range(NUM_CLIENTS)))
    wait_for(lambda: is_idle(server), what="the work has stopped")
    assert server.pids() == pids
    assert server.log.count("\n") - num_lines <= MAX_LOG_LINES
    assert "Traceback" not in server.log
    answer = server.http.post("/v1/completions", json=json.loads(body(max_tokens=3, stream=False)))
    assert answer.json()["usage"]["completion_tokens"] == 3
