"""Bodies travel through the HTTP process and the router as they are, whatever is in them, and stall nobody."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.helpers.server import SIMULATED, Server, running_server

HEADERS = {"content-type": "application/json"}


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


@pytest.mark.parametrize("megabytes", [5, 25])
def test_health_does_not_notice_a_huge_body(megabytes: int) -> None:
    """/health froze for 4.8 s at 5 MB and 29 s at 27 MB: vllm#24910."""
    words = "It was the best of times, it was the worst of times, it was the age of wisdom. "
    content = words * (megabytes * 1_000_000 // len(words))
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    with running_server(*SIMULATED, "--max-model-len", "8192") as server:
        url = f"{server.url}/v1/chat/completions"
        with _poller(server) as polls:
            for _ in range(10):  # one alone may be through between two polls
                answer = httpx.post(url, content=body, headers=HEADERS, timeout=120, trust_env=False)
                assert answer.status_code == 400
                assert answer.json()["error"]["code"] == "context_length_exceeded"
        seconds = polls()
    assert len(seconds) >= 2
    assert max(seconds) < 0.1


@contextmanager
def _poller(server: Server) -> Iterator[Callable[[], list[float]]]:
    """Ask for /health every 20 ms from a process of its own, so that the test's own work does not count.

    It asks until its input ends and is never killed while it works: the last line would be half a line.
    """
    script = (
        "import http.client, select, sys, time\n"
        "line = http.client.HTTPConnection(sys.argv[1])\n"
        "while True:\n"
        "    start = time.perf_counter(); line.request('GET', '/health'); answer = line.getresponse(); answer.read()\n"
        "    print(answer.status, time.perf_counter() - start, flush=True)\n"
        "    if select.select([sys.stdin], [], [], 0.02)[0]: break\n"
    )
    address = server.url.removeprefix("http://")
    process = subprocess.Popen(
        [sys.executable, "-c", script, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    seconds: list[float] = []

    def stop() -> list[float]:
        for line in process.communicate(timeout=60)[0].splitlines():
            status, took_s = line.split()
            assert status == "200"
            seconds.append(float(took_s))
        return seconds

    try:
        yield stop
    finally:
        process.kill()
        process.wait()
