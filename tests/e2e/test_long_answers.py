"""What takes long to write for one client is written between the texts of others."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.hiccups import ROUNDS, hiccups
from tests.helpers.server import Server

CLIENT = """
import http.client, sys, time
body = sys.stdin.buffer.read()
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=90)
start_s = time.monotonic()
connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
answer = connection.getresponse()
num_bytes = 0
while piece := answer.read(1 << 20):
    num_bytes += len(piece)
print(answer.status, num_bytes, time.monotonic() - start_s)
"""
PROMPT = [200 + place * 7 % 30_000 for place in range(24_000)]  # with 20 alternatives each: near the limit
NUM_EVENTS_ALONE = 100
SHARE = 1 / 2  # of the time that the answer takes: written in one go, it is nearly all of it


@pytest.mark.parametrize(
    "wanted", [{"prompt_logprobs": 20}, {"logprobs": 20, "echo": True, "stream": True}], ids=["prompt_logprobs", "echo"]
)
def test_a_stream_goes_on_while_a_long_prompt_is_reported(simulated: Server, wanted: dict[str, Any]) -> None:
    """Other streams stood still for a second, as long as the report on the prompt of one request was written."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1, **wanted}).encode()
    with simulated.begun_stream({"prompt": "hello", "max_tokens": 1_000_000}) as lines:
        for _ in range(ROUNDS):
            with hiccups() as machine_is_late_s:
                alone_s = longest_gap_s(lines, after(NUM_EVENTS_ALONE))
                beside_s, answer_s = gap_beside(simulated, lines, body)
                bound_s = SHARE * answer_s + alone_s + machine_is_late_s()
            if beside_s < bound_s:
                return
    raise AssertionError(f"a gap of {beside_s:.3f} s beside {alone_s:.3f} s alone; the answer took {answer_s:.3f} s")


def gap_beside(server: Server, lines: Iterator[str], body: bytes) -> tuple[float, float]:
    """The stream's longest gap while another client waits for its answer, and how long that waited, s."""
    command = [sys.executable, "-c", CLIENT, server.url.rpartition(":")[2]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(body)
        client.stdin.close()
        gap_s = longest_gap_s(lines, lambda: client.poll() is not None)
        status, num_bytes, answer_s = client.stdout.read().split()
    assert (int(status), int(num_bytes) > 10_000_000) == (200, True)
    return gap_s, float(answer_s)


def after(num_events: int) -> Callable[[], bool]:
    """Whether it was called so often."""
    events = iter(range(num_events))
    return lambda: next(events, None) is None


def longest_gap_s(lines: Iterator[str], is_over: Callable[[], bool]) -> float:
    """Between two events of a stream."""
    worst_s, last_s = 0.0, time.monotonic()
    for line in lines:
        if line.startswith("data: "):
            now_s = time.monotonic()
            worst_s, last_s = max(worst_s, now_s - last_s), now_s
            if is_over():
                return worst_s
    raise AssertionError("the stream ended")
