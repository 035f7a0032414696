"""Servers that tests share where they do no harm to them."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.helpers.loopback_only import loopback_only
from tests.helpers.server import SIMULATED, Server, running_server

__all__ = ["api", "client", "default_model", "impatient", "loopback_only", "model", "simulated", "thinking"]

API_KEY = "secret"  # of the impatient one


@pytest.fixture(scope="session")
def simulated() -> Iterator[Server]:
    """The whole system around a simulated engine of 5 ms a step."""
    with running_server(*SIMULATED, "--set", "simulated.step_ms=5") as server:
        yield server


@pytest.fixture(scope="session")
def default_model() -> Iterator[Server]:
    """The whole system with the default model on this machine's CPU."""
    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def thinking() -> Iterator[Server]:
    """The default model again, whose thoughts are split off."""
    with running_server("--set", "model.reasoning_parser=think", "--set", "engine.kv_cache_tokens=8192") as server:
        yield server


@pytest.fixture(scope="session")
def impatient() -> Iterator[Server]:
    """A simulated engine whose clients need a key, and are given three seconds."""
    limits = ("--set", "simulated.step_ms=5", "--set", "router.total_timeout_s=3")
    with running_server(*SIMULATED, *limits, "--api-key", API_KEY) as server:
        yield server


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
