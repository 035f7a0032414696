"""Servers that tests share where they do no harm to them."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.helpers.loopback_only import loopback_only
from tests.helpers.server import SIMULATED, Server, running_server

__all__ = ["api", "client", "default_model", "loopback_only", "model", "simulated"]


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


@pytest.fixture
def client(simulated: Server) -> Iterator[httpx.Client]:
    """HTTP to the simulated system."""
    with httpx.Client(base_url=simulated.url, timeout=30, trust_env=False) as http:
        yield http


@pytest.fixture
def api(default_model: Server) -> Iterator[openai.OpenAI]:
    """The openai package against the default model."""
    with openai.OpenAI(base_url=f"{default_model.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def model(api: openai.OpenAI) -> str:
    """The name of the default model, as a client finds it."""
    return api.models.list().data[0].id
