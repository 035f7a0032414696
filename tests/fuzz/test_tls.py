"""Random and mutated TLS: handshakes and records with bytes that were changed, lost or doubled, from clients that leave
at any moment. Nothing but closed connections may come of it, and others are served meanwhile.
"""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
from pathlib import Path

import pytest

from tests.helpers.api_server import ApiServer
from tests.helpers.certificates import Certificates
from tests.helpers.http_client import get
from tests.helpers.mutated_requests import mutated
from tests.helpers.wait import wait_for


def changed(data: bytes, choice: random.Random) -> bytes:
    """Usually in a few bytes, often not at all."""
    changing = bytearray(data)
    for _ in range(choice.choice((0, 0, 0, 1, 1, 2, 5))):
        place = choice.randrange(len(changing) + 1)
        match choice.randrange(4):
            case 0:
                changing[place : place + 1] = choice.randbytes(1)
            case 1:
                changing[place:place] = choice.randbytes(choice.choice((1, 5, 300)))
            case 2:
                del changing[place : place + choice.choice((1, 5, 100))]
            case 3:
                changing += changing[place:]
    return bytes(changing)


def one_life(address: tuple[str, int], certificates: Certificates, choice: random.Random) -> None:
    """A client that shakes hands as far as its changed bytes allow, then sends changed records of changed requests."""
    context = certificates.client_context()
    if choice.random() < 0.3:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    is_faithful = choice.random() < 0.5  # until its hands are shaken
    requests = mutated(choice)
    with socket.create_connection(address, timeout=60) as line, contextlib.suppress(OSError):
        for _ in range(20):
            line.settimeout(60 if is_faithful else choice.choice((0.01, 0.1)))  # the server may wait for what was lost
            with contextlib.suppress(ssl.SSLWantReadError):
                client.do_handshake()
                line.settimeout(0.1)
                client.write(requests[:16_000])
                requests = requests[16_000:] or b"\r\n"
                is_faithful = is_faithful and choice.random() < 0.5
            data = outgoing.read()
            for start in range(0, len(data), 5000):
                line.sendall(data[start : start + 5000] if is_faithful else changed(data[start : start + 5000], choice))
            if choice.random() < 0.05:
                break
            incoming.write(line.recv(65536) or choice.randbytes(1))
        if choice.random() < 0.3:
            line.shutdown(socket.SHUT_WR)


def live(server: ApiServer, certificates: Certificates, seeds: range) -> None:
    """Many lives, one after the other, and some whose connections stay open meanwhile."""
    with server.connect() as bystander:
        for seed in seeds:
            try:
                one_life(server.address, certificates, random.Random(seed))
                if seed % 50 == 0:
                    assert bystander.send(get("/health")).read_response().status == 200
            except BaseException:
                print(f"seed {seed}")  # noqa: T201
                raise
    wait_for(lambda: server.sweep(1) or not server.call(lambda: len(server.app.connections)), what="all are closed")
    assert server.call(lambda: server.client.num_open) == 0
    num_answers = sum(server.count("http_requests_total", code=code) for code in (200, 400, 404, 405, 413, 415, 431))
    assert num_answers > len(seeds) / 50 + len(seeds) / 10, "hardly any request came through"
    # Leaving the context of the server fails if any exception reached the loop.


def test_changed_bytes(tmp_path: Path) -> None:
    """250 lives."""
    certificates = Certificates(tmp_path)
    with ApiServer(certificates=certificates, header_timeout_s=2.0, max_body_bytes=300_000) as server:
        live(server, certificates, range(250))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_more_changed_bytes(tmp_path: Path) -> None:
    """5,000 lives."""
    certificates = Certificates(tmp_path)
    with ApiServer(certificates=certificates, header_timeout_s=2.0, max_body_bytes=300_000) as server:
        live(server, certificates, range(1000, 6000))
