"""Bodies travel through the HTTP process and the router as they are, whatever is in them, and stall nobody."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.helpers.hiccups import ROUNDS, hiccups
from tests.helpers.server import SIMULATED, Server, running_server
from tests.helpers.wait import wait_for

HEADERS = {"content-type": "application/json"}
NUM_POLLS = 30  # of /health beside huge bodies
MAX_POLL_S = 0.1  # beyond what the machine itself is late


def test_a_body_that_is_no_json_reaches_the_worker_untouched(simulated: Server, client: httpx.Client) -> None:
    """The error names the byte at which a worker's parser stumbled: nobody before it has looked."""
    body = b'{"prompt": "' + bytes(range(128, 256)) + b'"}'
    answer = client.post("/v1/completions", content=body, headers=HEADERS)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"
    assert client.post("/v1/completions", content=b"", headers=HEADERS).status_code == 400


def test_a_body_is_the_same_in_one_piece_and_in_many(client: httpx.Client) -> None:
    text = "héllo wörld " * 20_000
    body = json.dumps({"prompt": text}).encode()
    whole = client.post("/tokenize", content=body, headers=HEADERS).json()
    pieces = (body[start : start + 777] for start in range(0, len(body), 777))
    chunked = client.post("/tokenize", content=pieces, headers=HEADERS).json()
    assert whole["count"] > 40_000
    assert chunked == whole


def test_nobody_takes_turns_with_the_loop(simulated: Server, client: httpx.Client) -> None:
    """Pieces of bodies were lent to ZMQ, which had a second Python thread notified of each: it took the GIL from the
    loop."""
    body = json.dumps({"prompt": "hello world " * 100_000, "max_tokens": 1}).encode()
    assert client.post("/v1/completions", content=body, headers=HEADERS).status_code == 200
    names = [path.read_text().strip() for path in Path(f"/proc/{simulated.pid('api')}/task").glob("*/comm")]
    others = [name for name in names if not name.startswith("ZMQbg")]
    assert len(others) == 2, f"the main thread, and the one that watches for the parent's death: {names}"


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """Of a short context, for which huge bodies are far too long."""
    with running_server(*SIMULATED, "--max-model-len", "8192") as server:
        yield server


@pytest.mark.parametrize("megabytes", [5, 25])
def test_health_does_not_notice_a_huge_body(small: Server, megabytes: int) -> None:
    """/health froze for 4.8 s at 5 MB and 29 s at 27 MB: vllm#24910."""
    words = "It was the best of times, it was the worst of times, it was the age of wisdom. "
    content = words * (megabytes * 1_000_000 // len(words))
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    for _ in range(ROUNDS):
        with polls(small) as seconds, hiccups() as machine_is_late_s:
            num_before = len(seconds)
            while len(seconds) < num_before + NUM_POLLS:
                answer = small.http.post("/v1/chat/completions", content=body, headers=HEADERS)
                assert answer.status_code == 400
                assert answer.json()["error"]["code"] == "context_length_exceeded"
            bound_s = MAX_POLL_S + machine_is_late_s()
        if max(seconds) < bound_s:
            return
    raise AssertionError(f"/health took {max(seconds):.3f} s")


@contextmanager
def polls(server: Server) -> Iterator[list[float]]:
    """Within, a process of its own asks for /health every 10 ms; how long each answer took, complete at the end.

    It asks until its input ends and is never killed while it works: the last line would be half a line.
    """
    script = (
        "import http.client, select, sys, time\n"
        "line = http.client.HTTPConnection(sys.argv[1])\n"
        "while True:\n"
        "    start = time.perf_counter(); line.request('GET', '/health'); answer = line.getresponse(); answer.read()\n"
        "    print(answer.status, time.perf_counter() - start, flush=True)\n"
        "    if select.select([sys.stdin], [], [], 0.01)[0]: break\n"
    )
    command = [sys.executable, "-c", script, server.url.removeprefix("http://")]
    seconds: list[float] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None

        def read() -> None:
            for line in process.stdout or ():
                status, took_s = line.split()
                assert status == "200"
                seconds.append(float(took_s))

        with ThreadPoolExecutor(1) as reader:
            reading = reader.submit(read)
            wait_for(lambda: seconds or reading.done(), what="it asks")
            try:
                yield seconds
            finally:
                process.stdin.close()
            reading.result()
