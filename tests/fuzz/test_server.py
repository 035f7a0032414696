"""Bodies of every kind for the whole running system: each gets its answer or an error envelope, and nobody dies.

Never a 500 (nor another server error), never a 422, never a stream that fails after it has begun.
"""

from __future__ import annotations

import http.client
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Union
from urllib.parse import urlsplit

import msgspec
import pytest

from api.app import ROUTES
from tests.helpers import mutated_bodies, tiny_tokenizers
from tests.helpers.server import SIMULATED, Server, running_server
from tests.helpers.tiny_models import COMMON
from tokservice.protocol.openapi import EVENTS, JSON, OPERATIONS, Operation
from tokservice.wire.errors import SSE_DONE
from tokservice.wire.messages import Route

pytestmark = pytest.mark.timeout(300)

NUM_CONNECTIONS = 8
MAX_MODEL_LEN = 64
CLIENT_ERRORS = {400, 404, 413}
BY_ROUTE = {ROUTES[operation.path]: operation for operation in OPERATIONS if operation.body}
CORPUS = Path(__file__).parent / "tokenizer" / "corpus"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with a tokenizer: guides, penalties and logprobs are the real engine's."""
    import transformers

    folder = tiny_tokenizers.write_model(tmp_path_factory.mktemp("model"), tiny_tokenizers.byte_level())
    config = transformers.LlamaConfig(**COMMON | {"vocab_size": 448, "max_position_embeddings": MAX_MODEL_LEN})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def servers(tiny_model: Path) -> Iterator[dict[str, Server]]:
    """With either engine. The second one starts while the first is at work."""
    arguments = {
        "simulated": (*SIMULATED, "--set", "simulated.step_ms=0", "--set", f"simulated.max_model_len={MAX_MODEL_LEN}"),
        "torch": ("--model", str(tiny_model)),
    }
    named = ("--served-model-name", mutated_bodies.MODEL)
    with ExitStack() as stack:
        yield {
            engine: stack.enter_context(running_server(*of, *named, ready=False)) for engine, of in arguments.items()
        }


@pytest.fixture(scope="module", params=["simulated", "torch"])
def server(request: pytest.FixtureRequest, servers: dict[str, Server]) -> Server:
    server = servers[request.param]
    server.wait_until_ready()
    return server


def random_bytes(seed: int, count: int) -> Iterator[tuple[Route, bytes]]:
    """Bodies that are hardly ever JSON."""
    rng = random.Random(seed)
    routes = list(BY_ROUTE)
    for _ in range(count):
        yield rng.choice(routes), rng.choice((b"", b"{", b'{"prompt": "')) + rng.randbytes(rng.randrange(300))


def check(operation: Operation, status: int, media_type: str, data: bytes) -> None:
    """The answer is one of those that the description promises for a bad or a good body."""
    if status != 200:
        assert status in CLIENT_ERRORS
        assert media_type == JSON
        msgspec.json.decode(data, type=operation.error)
    elif media_type == EVENTS:
        if len(operation.events) == 1:
            assert data.endswith(SSE_DONE)
            data = data.removesuffix(SSE_DONE)
        events, end = data.decode().split("\n\n")[:-1], data[-2:]
        assert end == b"\n\n"
        for event in events:
            told = msgspec.json.decode(event.rpartition("data: ")[2], type=Union[operation.events])  # noqa: UP007
            assert "error" not in type(told).__name__.lower()
            assert "failed" not in type(told).__name__.lower()
    else:
        assert media_type == JSON
        msgspec.json.decode(data, type=operation.answer)


def send(server: Server, bodies: Iterator[tuple[Route, bytes]]) -> Counter[tuple[Route, int]]:
    """Send all, over several connections; how many of each route got which status.

    Fails with the first body that did harm.
    """
    statuses: Counter[tuple[Route, int]] = Counter()
    faults: list[tuple[object, ...]] = []
    lock = threading.Lock()

    def work() -> None:
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
        while not faults:
            with lock:
                following = next(bodies, None)
            if following is None:
                break
            route, body = following
            answer: Any = None
            data = b""
            try:
                connection.request("POST", BY_ROUTE[route].path, body, {"Content-Type": JSON})
                answer = connection.getresponse()
                data = answer.read()
                media_type = (answer.getheader("content-type") or "").partition(";")[0]
                check(BY_ROUTE[route], answer.status, media_type, data)
            except Exception as error:  # whatever it is, the body belongs to it
                faults.append((error, route, body, answer and answer.status, data[-2000:]))
            else:
                with lock:
                    statuses[route, answer.status] += 1
        connection.close()

    threads = [threading.Thread(target=work) for _ in range(NUM_CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults[0]
    return statuses


def both(seed: int, count: int) -> Iterator[tuple[Route, bytes]]:
    """Nine tenths are mutations of right bodies."""
    yield from mutated_bodies.bodies(seed, count - count // 10)
    yield from random_bytes(seed, count // 10)


def run(server: Server, bodies: Iterator[tuple[Route, bytes]]) -> Counter[tuple[Route, int]]:
    before = server.pids()
    statuses = send(server, bodies)
    assert server.pids() == before, "no process was lost"
    return statuses


def test_bodies_of_every_kind(server: Server) -> None:
    statuses = run(server, both(seed=1, count=3000))
    assert statuses.total() == 3000
    for route in BY_ROUTE:
        assert min(statuses[route, 200], statuses[route, 400]) > 5, (route, "right and wrong bodies are among them")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_bodies(server: Server) -> None:
    assert run(server, both(seed=2, count=100_000)).total() == 100_000


def test_past_failures(server: Server) -> None:
    """Bodies that raise something else in a careless implementation."""
    files = [file.read_bytes() for file in sorted(CORPUS.iterdir())]
    assert run(server, iter([(route, body) for route in BY_ROUTE for body in files])).total() > 0
