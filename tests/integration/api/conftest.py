"""The API process's parts on a loop in a thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.api_server import ApiServer


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """With the default configuration."""
    with ApiServer() as api:
        yield api
