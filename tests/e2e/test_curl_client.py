"""``curl -N``: what a terminal, a proxy or a shell script sees of the simulated system."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.server import Server
from tests.helpers.sse import events, text_of
from tests.helpers.wait import wait_for

CURL = shutil.which("curl")
pytestmark = pytest.mark.skipif(CURL is None, reason="curl is not installed")

PATHS = ["/v1/completions", "/v1/chat/completions"]
ENDLESS = 500_000  # tokens: nothing that a test reads comes from the end of such a stream


def command(server: Server, path: str, body: str, *options: str) -> list[str]:
    json_header = ("-H", "Content-Type: application/json")
    return ["curl", "-sS", "-N", "--noproxy", "*", *options, *json_header, "--data-binary", body, f"{server.url}{path}"]


def body_of(path: str, **more: Any) -> dict[str, Any]:
    asked = {"prompt": "One two"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "One two"}]}
    return {**asked, "temperature": 0, "ignore_eos": True, **more}


def run(server: Server, path: str, body: str, *options: str) -> bytes:
    done = subprocess.run(
        command(server, path, body, "--max-time", "60", *options), capture_output=True, timeout=90, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout


@pytest.mark.parametrize("path", PATHS)
def test_streamed_and_plain_say_the_same(simulated: Server, path: str) -> None:
    plain = json.loads(run(simulated, path, json.dumps(body_of(path, max_tokens=30))))
    stream = events(run(simulated, path, json.dumps(body_of(path, max_tokens=30, stream=True))))
    (choice,) = plain["choices"]
    assert text_of(stream) == (choice["text"] if "text" in choice else choice["message"]["content"]) != ""
    assert stream[-1]["choices"][0]["finish_reason"] == choice["finish_reason"] == "length"


@pytest.mark.parametrize("path", PATHS)
def test_events_arrive_one_by_one(simulated: Server, path: str) -> None:
    """Each line is there while the stream goes on: nobody on the way gathers them up."""
    body = json.dumps(body_of(path, max_tokens=ENDLESS, stream=True))
    with subprocess.Popen(command(simulated, path, body, "--max-time", "100"), stdout=subprocess.PIPE) as curl:
        assert curl.stdout is not None
        for number in range(20):
            line = curl.stdout.readline()
            assert line.startswith(b"data: {"), number
            assert curl.stdout.readline() == b"\n"
            assert json.loads(line.removeprefix(b"data: "))["choices"][0]["finish_reason"] is None
        wait_for(lambda: simulated.gauge("num_requests_unfinished") == 1, what="the gauge has come")
        assert curl.poll() is None
        curl.terminate()
    wait_for(lambda: simulated.gauge("num_requests_unfinished") == 0, what="the hang-up aborted it")


def test_a_stream_says_what_it_is(simulated: Server, tmp_path: Path) -> None:
    head = tmp_path / "head"
    run(simulated, PATHS[0], json.dumps(body_of(PATHS[0], max_tokens=2, stream=True)), "--dump-header", str(head))
    lines = head.read_text().lower().splitlines()
    assert lines[0].startswith("http/1.1 200")
    assert any(line.startswith("content-type: text/event-stream") for line in lines)
    assert "transfer-encoding: chunked" in lines


def test_a_long_body_from_a_file(simulated: Server, tmp_path: Path) -> None:
    """curl asks before it sends more than a megabyte (Expect: 100-continue)."""
    file = tmp_path / "body.json"
    text = "one two " * 150_000
    file.write_text(json.dumps({"prompt": text}))
    answer = json.loads(run(simulated, "/tokenize", f"@{file}"))
    assert answer["count"] == len(answer["tokens"]) > 150_000
    again = run(simulated, "/tokenize", f"@{file}", "-H", "Transfer-Encoding: chunked")
    assert json.loads(again) == answer


def test_an_error_is_one_json_body_with_its_status(simulated: Server) -> None:
    body = json.dumps(body_of(PATHS[1], temperature=-1, stream=True))
    answer = run(simulated, PATHS[1], body, "--write-out", "\n%{http_code} %{content_type}")
    text, status = answer.decode().rsplit("\n", 1)
    assert status == "400 application/json"
    assert json.loads(text)["error"]["param"] == "temperature"
