"""Faults that users of other servers reported in public, and that no other test here names: each is tried from outside.

Ids are owner/repository#number on GitHub, shortened where the repository's name says enough.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.helpers.http_client import RawClient, get, post
from tests.helpers.server import ROOT, SIMULATED, Server, die_with_parent
from tests.helpers.sse import events
from tests.helpers.wait import wait_for
from tokservice.runtime.process import CONFIG_FILE

JSON_TYPE = "application/json"
JSON = {"content-type": JSON_TYPE}
USER = [{"role": "user", "content": "Hi"}]
EOS, SOME = 2, 1000  # of the default model
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 4},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 4},
    "/v1/messages": {"model": "", "messages": USER, "max_tokens": 4},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 4},
}
WRONG = {
    "half of an emoji: colibri#1589, Rapid-MLX#730": rb'"metadata":{"a":1},"temperature":"\ud83d"',
    "half of an emoji in the text: colibri#1589": rb'"%b":"\ud83d"',
    "not a number: sglang#28153, FreeToken#223": b'"temperature":NaN',
    "infinity: sglang#28153": b'"temperature":Infinity',
    "more than a float holds": b'"temperature":1e999',
    "a word for a flag: Rapid-MLX#837": b'"stream":"yes"',
    "a number too long to be printed": b'"top_k":1' + b"0" * 5000,
    "a fraction of a token: vllm#3341": b'"top_k":0.01',
    "no model at all": b'"model":"no-such-model"',
}


@pytest.fixture(scope="module")
def model(simulated: Server) -> str:
    """The served name."""
    return str(httpx.get(f"{simulated.url}/v1/models", trust_env=False).json()["data"][0]["id"])


def body(path: str, model: str, **fields: Any) -> dict[str, Any]:
    """A request that every route takes."""
    return ROUTES[path] | {"model": model} | fields


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_on_every_route(client: httpx.Client, model: str, path: str, name: str) -> None:
    """A 500, an answer, or an error behind a 200: one route checked what the next one let through."""
    wrong = WRONG[name].replace(b"%b", b"system" if path == "/v1/messages" else b"user")
    for stream in (False, True):
        right = json.dumps(body(path, model, stream=stream)).encode()
        answer = client.post(path, content=right[:-1] + b"," + wrong + b"}", headers=JSON)
        assert (answer.status_code, answer.headers["content-type"]) == (404 if "model" in name else 400, JSON_TYPE)
        assert answer.json()["error"]["message"]
    assert client.post(path, content=right, headers=JSON).status_code == 200


@pytest.mark.parametrize("fields", [{"top_k": -1}, {"top_k": 0}, {"temperature": 1e-6}, {"temperature": 1e-300}])
def test_values_at_the_edge_are_served(default_model: Server, fields: dict[str, Any]) -> None:
    """They ended the server: TensorRT-LLM#6329, aici#19, vllm#2754."""
    request = {"prompt": "The capital of France is", "max_tokens": 2, "seed": 1, "temperature": 0} | fields
    answer = httpx.post(f"{default_model.url}/v1/completions", json=request, timeout=60, trust_env=False)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 2)


def test_no_tokens_asked_for_again_and_again(client: httpx.Client) -> None:
    """The second such request brought the engine down: TensorRT-LLM#7692."""
    for _ in range(3):
        answer = client.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 0})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
    assert client.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 1}).status_code == 200


def test_a_refused_body_is_not_the_next_request(simulated: Server, model: str) -> None:
    """The unread body of a refused request was taken for the next request's first line: colibri#610."""
    address = urlsplit(simulated.url)
    request = json.dumps(body("/v1/completions", model)).encode()
    with RawClient((str(address.hostname), int(address.port or 0))) as client:
        for refused, status in (
            (post(request, path="/nowhere"), 404),
            (post(request, path="/health"), 405),
            (post(request, "Content-Encoding: gzip"), 415),
            (post(b"{" + request), 400),
            (post(request.replace(b"Hi", b"\xff")), 400),
        ):
            assert client.send(refused + post(request) + get("/health")).read_response().status == status
            assert client.read_response().status == 200
            assert client.read_response().status == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_an_answer_that_ends_at_once_is_an_answer(client: httpx.Client, model: str, path: str) -> None:
    """It had no reason, no role or no end, or was an error: vllm-mlx#628, LightLLM#130, Rapid-MLX#826."""
    request = body(path, model, logit_bias={str(EOS): 100})
    plain = client.post(path, json=request).json()
    stream = client.post(path, json=request | {"stream": True}).content
    if path == "/v1/responses":
        kinds = re.findall(r"^event: (.*)$", stream.decode(), re.MULTILINE)
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        assert (plain["status"], plain["usage"]["output_tokens"]) == ("completed", 1)
        return
    assert plain["usage"]["completion_tokens"] == 1
    (choice,) = plain["choices"]
    (event,) = events(stream)
    (streamed,) = event["choices"]
    assert choice["finish_reason"] == streamed["finish_reason"] == "stop"
    if path == "/v1/completions":
        assert choice["text"] == streamed["text"] == ""
    else:
        assert choice["message"]["content"] == ""
        assert streamed["delta"]["role"] == "assistant"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_chunks_of_a_stream_belong_together(client: httpx.Client, model: str, path: str) -> None:
    """Each chunk had an id of its own (Rapid-MLX#461), all choices the index 0 (LightLLM#130), a choice two ends
    (Rapid-MLX#433); the last chunks were those of one choice alone (vllm#16805).
    """
    logprobs = {"logprobs": True} if "chat" in path else {"logprobs": 0}
    request = body(path, model, n=3, seed=4, stream=True, stream_options={"include_usage": True}) | logprobs
    *chunks, closing = events(client.post(path, json=request).content)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in [*chunks, closing]}) == 1
    assert (closing["choices"], closing["usage"]["completion_tokens"]) == ([], 12)
    assert all(chunk["usage"] is None for chunk in chunks)
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(3):
        mine = [part for part in parts if part["index"] == index]
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + ["length"]
        if "chat" in path:
            assert [part["delta"].get("role") for part in mine] == ["assistant", *[None] * (len(mine) - 1)]
            tokens = [entry["token"] for part in mine for entry in part["logprobs"]["content"]]
        else:
            tokens = [token for part in mine for token in part["logprobs"]["tokens"]]
        assert len(tokens) == 4


def test_who_leaves_is_counted(simulated: Server, model: str) -> None:
    """Requests whose clients had left were in no count, or in some of them: vllm#31503, vllm#55634, Rapid-MLX#783."""

    def counts() -> Counter[str]:
        rows = re.findall(r"^tokservice_(\S+) (\S+)$", simulated.metrics(), re.MULTILINE)
        return Counter({name: int(float(value)) for name, value in rows})

    left, prompts, prompts_each = (
        'requests_total{outcome="client_closed"}',
        "prompt_tokens_total",
        "request_prompt_tokens_sum",
    )
    before = counts()
    for _ in range(3):
        with simulated.begun_stream(body("/v1/completions", model, max_tokens=100_000, ignore_eos=True)):
            pass
    wait_for(lambda: counts()[left] - before[left] >= 3, what="they are counted")
    wait_for(lambda: not counts()["num_requests_running"] and not counts()["num_requests_unfinished"], what="idle")
    after = counts()
    assert after[prompts] - before[prompts] == after[prompts_each] - before[prompts_each] > 0


def test_a_short_request_for_a_huge_answer_is_refused(client: httpx.Client, model: str) -> None:
    """Each choice tells of the whole prompt: of the kind of gpt4all#3635."""
    request = {"model": model, "prompt": [SOME] * 8000, "n": 40, "max_tokens": 1}
    for fields in ({"prompt_logprobs": 20}, {"echo": True, "logprobs": 20, "stream": True}):
        answer = client.post("/v1/completions", json=request | fields)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "answer_too_large")


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"type": "object", "properties": {}},
        {"type": "object", "properties": {"a": {"type": "string", "maxLength": 1_000_000}}},
        {"type": "object", "properties": {"a": {"type": "array", "minItems": 100_000, "items": {"type": "integer"}}}},
    ],
)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_schema_of_unusual_form_does_not_spoil_the_other_tools(
    client: httpx.Client, parameters: dict[str, Any] | None, choice: str
) -> None:
    """One tool without parameters, or with a long text, broke every call: llama.cpp#25923."""
    usual = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [
        {"type": "function", "function": {"name": "odd"} | ({} if parameters is None else {"parameters": parameters})},
        {"type": "function", "function": {"name": "usual", "parameters": usual}},
    ]
    request = {"messages": USER, "max_tokens": 2, "tools": tools, "tool_choice": choice}
    assert client.post("/v1/chat/completions", json=request).status_code == 200


def test_a_call_without_arguments_can_be_sent_back(client: httpx.Client) -> None:
    """Its arguments were refused, and with them the rest of the conversation: vllm#43851, vllm#19419."""
    for arguments in ("null", "", "{}", None):
        call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turns = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        turns.append({"role": "tool", "tool_call_id": "call_1", "content": "done"})
        answer = client.post("/v1/chat/completions", json={"messages": USER + turns, "max_tokens": 1})
        assert answer.status_code == 200, answer.text


def test_a_model_that_would_write_blanks_for_ever_writes_json(default_model: Server) -> None:
    """It wrote line ends to its limit: omlx#2990, vllm#38696, ollama#2577, sglang#8250."""
    with httpx.Client(base_url=default_model.url, timeout=60, trust_env=False) as http:
        (line_end,) = http.post("/tokenize", json={"prompt": "\n"}).json()["tokens"]
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        schema["additionalProperties"] = False  # type: ignore[assignment]
        request = {"messages": USER, "max_tokens": 60, "temperature": 0, "logit_bias": {str(line_end): 50}}
        request["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        (choice,) = http.post("/v1/chat/completions", json=request).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"]).keys() == {"a"}


def test_a_schema_for_the_answer_does_not_keep_the_model_from_its_tools(default_model: Server) -> None:
    """It could not call them, and agents ask for both in each request: vllm#39929, vllm#16313."""
    with httpx.Client(base_url=default_model.url, timeout=60, trust_env=False) as http:

        def answer(beginning: str) -> dict[str, Any]:
            (token,) = http.post("/tokenize", json={"prompt": beginning, "add_special_tokens": False}).json()["tokens"]
            tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
            schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
            schema["additionalProperties"] = False
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            request = {"messages": USER, "max_tokens": 60, "temperature": 0, "logit_bias": {str(token): 20}}
            request |= {"tools": [tool], "response_format": form}
            (choice,) = http.post("/v1/chat/completions", json=request).json()["choices"]
            return dict(choice)

        called, said = answer("<"), answer("{")
    assert called["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert called["message"]["content"] is None
    assert json.loads(said["message"]["content"]).keys() == {"a"}
    assert said["finish_reason"] == "stop"


def nobody_reads() -> None:
    """Standard output is a pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


def no_streams() -> None:
    """All of them are closed, and the next files that are opened get their numbers."""
    os.closerange(0, 3)


@pytest.mark.parametrize("streams", [nobody_reads, no_streams, None])
def test_standard_streams_do_not_end_the_server(tmp_path: Path, streams: Callable[[], None] | None) -> None:
    """``| head -1`` ended it just when it was ready: the banner met a broken pipe. So did a model's name of letters
    that the terminal lacks. Without a standard error it did not start.
    """
    settings = ("--port", "0", "--served-model-name", "é", "--set", f"runtime.run_dir={tmp_path}/run")

    def before_exec() -> None:
        die_with_parent()
        if streams:
            streams()

    def is_ready() -> bool:
        assert launcher.poll() is None, f"it ended with code {launcher.returncode}"
        try:
            port = json.loads((tmp_path / "run" / CONFIG_FILE).read_text())["api"]["port"]
            return httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False).status_code == 200
        except (OSError, ValueError, httpx.TransportError):  # not yet
            return False

    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "launch.py"), *SIMULATED, *settings],
            stdout=log,
            stderr=log,
            env=os.environ | {"PYTHONIOENCODING": "ascii"},
            preexec_fn=before_exec,
        ) as launcher,
    ):
        wait_for(is_ready, 60, "the server is ready")
        launcher.terminate()
        assert launcher.wait(30) == 0
