"""HTTP against the whole system with a simulated engine: what the tests of the API's parts show, shown of the truth."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.helpers.http_client import RawClient, chunked, get, post, post_head
from tests.helpers.ipv6 import HAS_IPV6
from tests.helpers.server import SIMULATED, Server, running_server
from tests.helpers.wait import wait_for

HOST = "::1" if HAS_IPV6 else "127.0.0.1"
KEY = "Authorization: Bearer second"
SETTINGS = {
    "api.processes": 2,
    "api.max_body_bytes": 200_000,
    "api.header_timeout_s": 2.0,
    "api.max_unsent_bytes": 20_000,
    "simulated.step_ms": 1.0,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Two API processes, on an IPv6 address where there is one, small limits, API keys."""
    settings = [text for key, value in SETTINGS.items() for text in ("--set", f"{key}={value}")]
    keys = ("--api-key", "first", "--api-key", "second")
    with running_server(*SIMULATED, "--host", HOST, *keys, *settings) as running:
        yield running


def connect(server: Server, *, receive_buffer: int = 0) -> RawClient:
    """To any of the two processes."""
    address, _, port = server.url.rpartition(":")
    assert address == ("http://[::1]" if HAS_IPV6 else "http://127.0.0.1")
    return RawClient((HOST, int(port)), receive_buffer=receive_buffer)


def model(server: Server) -> str:
    """The served name."""
    with connect(server) as client:
        return str(json.loads(client.send(get("/v1/models", KEY)).read_response().body)["data"][0]["id"])


def completion(server: Server, *, max_tokens: int, stream: bool = False, n: int = 1) -> bytes:
    """A body. The simulated engine goes on until max_tokens."""
    request = {"model": model(server), "prompt": "Hello", "max_tokens": max_tokens, "ignore_eos": True}
    request |= {"n": n, "seed": 1}
    return json.dumps(request | ({"stream": True} if stream else {})).encode()


def is_idle(server: Server) -> bool:
    """No request is anywhere."""
    return not any(server.gauge(name) for name in ("num_requests_unfinished", "num_requests_running"))


def test_everything_on_one_connection(server: Server) -> None:
    """Pages, errors, a plain response, a stream and pipelined requests, in their order."""
    body, streamed = completion(server, max_tokens=20), completion(server, max_tokens=20, stream=True)
    with connect(server) as client:
        assert client.send(post(body)).read_response().status == 401
        assert client.send(get("/nowhere", KEY)).read_response().status == 404
        client.send(post(body, KEY) + post(streamed, KEY) + post(b"{", KEY) + get("/health"))
        client.send(post_head(KEY, "Transfer-Encoding: chunked") + chunked(body[:10], body[10:]))
        plain, stream, invalid, health, again = (client.read_response() for _ in range(5))
        assert [item.status for item in (plain, stream, invalid, health, again)] == [200, 200, 400, 200, 200]
        assert json.loads(invalid.body)["error"]["type"] == "invalid_request_error"
        text = json.loads(plain.body)["choices"][0]["text"]
        events = stream.body.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]) == text
        assert json.loads(again.body)["choices"][0]["text"] == text
        assert again.keeps_alive


def test_limits(server: Server) -> None:
    """Too large a body, too large a head, too slow a head: each is told so, and the connection closes in order."""
    for data, status in (
        (post_head(KEY, "Content-Length: 200001"), 413),
        (post_head(KEY, "Transfer-Encoding: chunked") + chunked(b"x" * 150_000, b"x" * 50_001), 413),
        (get("/health", "x: " + "y" * 100_000), 431),
        (b"GET /health HTTP/1.1\r\nHo", 408),
    ):
        with connect(server) as client:
            assert client.send(data).read_response().status == status
            assert client.is_closed()
    wait_for(lambda: is_idle(server), what="idle")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(server: Server, stream: bool) -> None:
    """The engine is free soon, though the request had minutes to go."""
    with connect(server) as client:
        client.send(post(completion(server, max_tokens=500_000, stream=stream), KEY))
        if stream:
            client.read_head()
            client.read_chunk()
        wait_for(lambda: server.gauge("num_requests_running"), what="it runs")
    wait_for(lambda: is_idle(server), what="idle")


def test_a_client_that_does_not_read(server: Server) -> None:
    """Cut off at the cap, counted, and the engine is free."""
    before = server.gauge("http_slow_readers_total")
    with connect(server, receive_buffer=4096) as client:
        client.send(post(completion(server, max_tokens=500_000, stream=True, n=64), KEY))
        wait_for(lambda: server.gauge("http_slow_readers_total") > before, what="it is cut off")
        wait_for(lambda: is_idle(server), what="idle")


def test_each_process_tells_of_its_own_loop(server: Server) -> None:
    """The lag of one API process was hidden in the sum of all: each has a histogram, which goes on."""

    def num_beats() -> dict[str, int]:
        rows = re.findall(r'event_loop_lag_seconds_count\{process="([^"]+)"\} (\d+)', server.metrics())
        return {process: int(count) for process, count in rows}

    before = num_beats()
    assert before.keys() == {"api.0", "api.1"}
    wait_for(lambda: all(count > before[name] for name, count in num_beats().items()), what="both go on")
