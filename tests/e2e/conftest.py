"""Servers that tests share where they do no harm to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest

from tests.helpers.loopback_only import loopback_only
from tests.helpers.server import SIMULATED, Server, running_server
from tests.helpers.tiny_tokenizers import byte_level, write_model
from tokservice.models.default_model import ensure_default_model

__all__ = ["api", "client", "default_model", "impatient", "loopback_only", "model", "simulated", "small", "thinking"]

STEP = ("--set", "simulated.step_ms=5")
ONE_THREAD = ("--set", "engine.threads=1")  # other tests have the other core: two would wait for each other
SELDOM = ("--set", "runtime.heartbeat_s=0.5")  # heartbeats of idle servers took a twelfth of the whole run's CPU
LITTLE_CACHE = ("--set", "engine.kv_cache_tokens=8192")
API_KEY = "secret"  # of the impatient one


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model, but for all layers after the first: what it says is nonsense, and said at once."""
    folder, whole = tmp_path_factory.mktemp("one-layer"), ensure_default_model()
    for file in whole.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    config = json.loads((whole / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return folder


@pytest.fixture(scope="session")
def shared(request: pytest.FixtureRequest, one_layer: Path) -> Iterator[dict[str, Server]]:
    """The servers below that any test of this run wants. They start together: most of them wait for one core."""
    arguments: dict[str, tuple[str, ...]] = {
        "simulated": (*SIMULATED, *STEP),
        "default_model": ONE_THREAD,
        "thinking": ("--model", str(one_layer), *LITTLE_CACHE, *ONE_THREAD, "--set", "model.reasoning_parser=think"),
        "impatient": (*SIMULATED, *STEP, "--set", "router.total_timeout_s=3", "--api-key", API_KEY),
    }
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    with ExitStack() as servers:
        yield {
            name: servers.enter_context(running_server(*of, *SELDOM, ready=False))
            for name, of in arguments.items()
            if name in wanted
        }


def ready(server: Server) -> Server:
    server.wait_until_ready()
    return server


@pytest.fixture(scope="session")
def simulated(shared: dict[str, Server]) -> Server:
    """The whole system around a simulated engine of 5 ms a step."""
    return ready(shared["simulated"])


@pytest.fixture(scope="session")
def default_model(shared: dict[str, Server]) -> Server:
    """The whole system with the default model on this machine's CPU."""
    return ready(shared["default_model"])


@pytest.fixture(scope="session")
def thinking(shared: dict[str, Server]) -> Server:
    """The torch engine again, with an option: thoughts are split off."""
    return ready(shared["thinking"])


@pytest.fixture(scope="session")
def impatient(shared: dict[str, Server]) -> Server:
    """A simulated engine whose clients need a key, and are given three seconds."""
    return ready(shared["impatient"])


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Arguments of a system that starts twice as fast: one tokenizer process, a tiny vocabulary."""
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny", byte_level())
    return (*SIMULATED, "--set", "tokenizer.workers=1", "--model", str(folder))


@pytest.fixture
def client(simulated: Server) -> httpx.Client:
    """HTTP to the simulated system."""
    return simulated.http


@pytest.fixture(scope="session")
def api(default_model: Server) -> Iterator[openai.OpenAI]:
    """The openai package against the default model."""
    with openai.OpenAI(base_url=f"{default_model.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def model(api: openai.OpenAI) -> str:
    """The name of the default model, as a client finds it."""
    return api.models.list().data[0].id
