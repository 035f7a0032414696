"""The official ``openai`` package for Node against the default model."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.npm_folder import node, npm_folder
from tests.helpers.server import Server
from tests.helpers.wait import wait_for

pytestmark = pytest.mark.timeout(300)

SOURCE = Path(__file__).parent / "node"
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def told(default_model: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the client was told."""
    program, packages = node(), npm_folder(SOURCE)
    folder = tmp_path_factory.mktemp("node")
    shutil.copy(SOURCE / "openai_client.mjs", folder)
    (folder / "node_modules").symlink_to(packages / "node_modules")
    command = [program, "openai_client.mjs", f"{default_model.url}/v1", MODEL]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def test_streamed_and_plain_say_the_same(told: dict[str, Any]) -> None:
    assert told["models"] == [MODEL]
    assert "Paris" in told["chat"]["choices"][0]["message"]["content"]
    for plain, streamed in ((told["chat"], told["chatStream"]), (told["text"], told["textStream"])):
        (choice,) = plain["choices"]
        content = choice["text"] if "text" in choice else choice["message"]["content"]
        assert (streamed["text"], streamed["finish"]) == (content, choice["finish_reason"])
        assert streamed["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
        assert streamed["deltas"] > 1


def test_calls_and_formats_follow_their_schemas(told: dict[str, Any]) -> None:
    (call,) = told["call"]["choices"][0]["message"]["tool_calls"]
    (streamed,) = told["callStream"]["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {key: streamed["function"][key] for key in call["function"]}
    assert call["function"]["name"] == "look_up"
    assert json.loads(call["function"]["arguments"]).keys() == told["parsed"].keys() == {"word"}
    assert told["callStream"]["choices"][0]["finish_reason"] == told["call"]["choices"][0]["finish_reason"]


def test_errors_are_the_clients_own(told: dict[str, Any]) -> None:
    assert told["badField"] == {
        "name": "BadRequestError",
        "status": 400,
        "param": "temperature",
        "code": "invalid_value",
    }
    assert (told["unknownModel"]["name"], told["unknownModel"]["code"]) == ("NotFoundError", "model_not_found")
    assert (told["tooLong"]["status"], told["tooLong"]["code"]) == (400, "context_length_exceeded")


def test_a_stream_that_was_left_is_aborted(told: dict[str, Any], default_model: Server) -> None:
    assert told
    wait_for(lambda: default_model.gauge("num_requests_unfinished") == 0, what="it was aborted")
