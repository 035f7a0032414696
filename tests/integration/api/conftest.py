"""The API process's parts on a loop in a thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.api_server import ApiServer
from tests.helpers.certificates import Certificates


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Of one authority."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["tcp", "tls"])
def server(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[ApiServer]:
    """With the default configuration; whatever holds of connections holds with TLS too."""
    with ApiServer(certificates=certificates if request.param == "tls" else None) as api:
        yield api
