"""HTTPS as users meet it: the real clients, which check the certificate; a new one; and files that are no use."""

from __future__ import annotations

import signal
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.e2e.test_lifecycle import refusal
from tests.helpers.certificates import Certificates
from tests.helpers.server import SIMULATED, Server, running_server
from tests.helpers.wait import wait_for


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Of one authority."""
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def server(certificates: Certificates) -> Iterator[Server]:
    """The whole system, with a certificate, and two API processes."""
    arguments = (*SIMULATED, "--set", "api.processes=2", "--ssl-certfile", str(certificates.server))
    with running_server(*arguments, verify=certificates.client_context()) as running:
        yield running


def test_the_openai_client(server: Server, certificates: Certificates) -> None:
    """Streamed and plain say the same, over a connection that the client has verified."""
    assert server.url.startswith("https://127.0.0.1:")
    http: Any = httpx.Client(verify=certificates.client_context(), trust_env=False, timeout=60)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http) as client:
        model = client.models.list().data[0].id
        plain = client.completions.create(model=model, prompt="Hello", max_tokens=50, seed=1)
        stream = client.completions.create(model=model, prompt="Hello", max_tokens=50, seed=1, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == plain.choices[0].text != ""
        long = client.completions.create(model=model, prompt="word " * 100_000, max_tokens=1)
        assert long.usage is not None
        assert long.usage.prompt_tokens > 100_000


def test_clients_that_do_not_know_the_authority_refuse(server: Server) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{server.url}/health", trust_env=False, timeout=60)


def test_leaving_frees_the_engine(server: Server) -> None:
    """A stream over TLS that its client leaves is aborted like any other."""
    body = {"prompt": "x", "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    wait_for(lambda: server.gauge("num_requests_running") == 0, what="the engine is free")


def test_a_new_certificate_is_read_at_a_hangup(server: Server, certificates: Certificates) -> None:
    """``kill -HUP`` to the launcher, after a certificate was renewed; nothing that is open is cut."""

    def shown() -> set[str]:
        """The certificates on some connections, which both processes share."""
        found = set()
        for _ in range(8):
            address = server.url.removeprefix("https://").rpartition(":")
            connection = ssl.get_server_certificate((address[0], int(address[2])), ca_certs=str(certificates.authority))
            found.add(connection)
        return found

    with httpx.Client(base_url=server.url, verify=server.verify, trust_env=False, timeout=60) as http:
        assert http.get("/health").status_code == 200
        old = shown()
        assert len(old) == 1
        certificates.renew()
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: old.isdisjoint(new := shown()) and len(new) == 1, what="the new certificate")
        assert http.get("/health").status_code == 200
    wait_for(lambda: server.log.count("certificate loaded") == 2, what="both have said so")
    server.wait_until_status("/ready", 200)


def test_certificates_that_cannot_be_used_are_one_clear_line(tmp_path: Path, certificates: Certificates) -> None:
    """Found before anything starts; OpenSSL would ask the terminal for the password of a key."""
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    (tmp_path / "other").mkdir()
    other = Certificates(tmp_path / "other").server
    encrypted = tmp_path / "encrypted.pem"
    key = ec.generate_private_key(ec.SECP256R1())
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    encrypted.write_bytes(key.private_bytes(*form, serialization.BestAvailableEncryption(b"secret")))
    good = str(certificates.server)
    refused = [
        (("--ssl-certfile", "/no/such.pem"), "api.ssl_certfile: cannot read /no/such.pem: No such file or directory"),
        (("--ssl-certfile", str(tmp_path)), "Is a directory"),
        (("--ssl-certfile", str(nonsense)), f"api.ssl_certfile: {nonsense} holds no PEM certificate"),
        (("--ssl-certfile", str(certificates.authority)), "holds no private key that can be used"),
        (("--ssl-certfile", good, "--ssl-keyfile", str(nonsense)), f"{nonsense} holds no private key"),
        (("--ssl-certfile", good, "--ssl-keyfile", str(other)), f"{other} is not the key of the certificate in {good}"),
        (("--ssl-certfile", good, "--ssl-keyfile", str(encrypted)), f"api.ssl_keyfile: the key in {encrypted} is enc"),
        (("--ssl-certfile", good, "--ssl-ca-certs", str(nonsense)), f"api.ssl_ca_certs: {nonsense} holds no PEM cert"),
        (("--ssl-keyfile", good), "api.ssl_keyfile: needs api.ssl_certfile"),
    ]
    with ThreadPoolExecutor(2) as launches:
        printed = launches.map(lambda case: refusal(*SIMULATED, *case[0]), refused)
        for (_, message), line in zip(refused, printed, strict=True):
            assert message in line
