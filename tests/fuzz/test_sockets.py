"""Whatever arrives at the sockets of the running system: nothing dies, nothing hangs, nothing grows, and clients notice
nothing. Random frames, messages with some bytes changed, and whole messages from peers that nobody knows.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.helpers.server import SIMULATED, Server, running_server
from tests.helpers.wait import wait_for
from tests.helpers.wire_messages import messages
from tokservice.protocol.context import Context
from tokservice.protocol.context import encode as encode_context
from tokservice.wire import codec
from tokservice.wire.channels import dealer
from tokservice.wire.messages import (
    WIRE_VERSION,
    Abort,
    Accepted,
    Begin,
    EngineLimits,
    EngineOutputs,
    Generate,
    Heartbeat,
    Hello,
    Message,
    Metric,
    Peer,
    Prepare,
    PromptLogprobs,
    Publish,
    Rejected,
    Role,
    Route,
    SamplingParams,
    Stop,
    Submit,
    Topology,
    Undelivered,
)

BODY = {"prompt": "The quick brown fox", "max_tokens": 20, "seed": 1}
ALLOWED_GROWTH_BYTES = 150 * 1024 * 1024  # of all processes together; a single one of the messages may hold 1 MB
SENT_IN_A_ROW = 200


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One process of each kind."""
    with running_server(*SIMULATED, "--set", "simulated.step_ms=2", "--set", "tokenizer.workers=1") as running:
        yield running


@pytest.fixture(scope="module")
def samples() -> list[list[bytes]]:
    """Valid messages of all kinds, as frames."""
    found: list[list[bytes]] = []

    @seed(1)
    @settings(max_examples=200, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(messages())
    def collect(message: Message) -> None:
        found.append([bytes(memoryview(frame)) for frame in codec.encode(message)])

    collect()
    return found


class Stranger:
    """A peer that nobody knows, at one socket of the system."""

    def __init__(self, path: Path, choice: random.Random) -> None:
        self._path = path
        self._choice = choice
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._connect()

    def send(self, frames: list[bytes]) -> None:
        """As it is; where the pipe is full, when there is room, since the system has to go on reading."""
        assert self._socket.poll(60_000, zmq.POLLOUT), f"{self._path.name} does not read any more"
        self._socket.send_multipart(frames)
        if self._choice.random() < 0.01:
            self._socket.close(linger=1000)
            self._socket = self._connect()

    def send_raw(self, data: bytes) -> None:
        """Bytes that are not even ZMQ's."""
        with socket.socket(socket.AF_UNIX) as raw, contextlib.suppress(OSError):
            raw.connect(str(self._path))
            raw.sendall(data)
            if self._choice.random() < 0.5:
                raw.settimeout(0.01)
                raw.recv(100)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        """Once everything has left."""
        self._socket.close(linger=5000)
        self._context.term()

    def _connect(self) -> zmq.Socket[bytes]:
        is_inbox = self._path.suffix in (".ids", ".out")
        connected = self._context.socket(zmq.PUSH if is_inbox else zmq.DEALER)
        kind = self._choice.randrange(4)
        if kind == 0:
            connected.routing_id = self._choice.randbytes(self._choice.randrange(1, 255)).replace(b"\0", b"x")
        elif kind == 1:
            roles = ("api", "engine", "tokenizer", "detokenizer", "router", "supervisor", "")
            connected.routing_id = f"{self._choice.choice(roles)}.{self._choice.randrange(3)}.77".encode()
        connected.connect(f"ipc://{self._path}")
        return connected


def mutated(frames: list[bytes], choice: random.Random) -> list[bytes]:
    """With some bytes or frames changed."""
    frames = list(frames)
    for _ in range(choice.choice((1, 1, 2, 5))):
        place = choice.randrange(len(frames))
        data = bytearray(frames[place])
        at = choice.randrange(len(data) + 1)
        match choice.randrange(8):
            case 0 | 1 | 2:
                data[at : at + 1] = choice.randbytes(1)
            case 3:
                del data[at : at + choice.choice((1, 4, 100))]
            case 4:
                data[at:at] = choice.randbytes(choice.choice((1, 4, 100)))
            case 5:
                frames.insert(place, choice.randbytes(choice.choice((0, 4, 100))))
            case 6 if len(frames) > 1:
                del frames[place]
                continue
        frames[place] = bytes(data)
    return frames


def order(choice: random.Random) -> list[bytes]:
    """A message that would set off work, if it came from one of us: about a request that nobody has asked for."""
    request_id, attempt = f"api.0.1:{choice.randrange(10**6, 10**6 + 50)}", choice.choice((1, 1, 2, 3))
    detokenizer = choice.choice(("detokenizer.0.1", "detokenizer.0.1", "detokenizer.9.9", "", "api.0.1"))
    engine = choice.choice(("engine.0.1", "engine.0.1", "engine.9.9"))
    ids = array("I", [choice.choice((0, 5, 49_151, 49_152, 2**32 - 1)) for _ in range(choice.choice((1, 1, 3, 50)))])
    context = encode_context(_context(choice))
    output: dict[str, Any] = {"num_delivered": (choice.choice((0, 0, 1)),), "finished": (choice.randrange(5),)}
    made: list[Message] = [
        Generate(request_id, attempt, detokenizer, 1, frames=(_sampling(choice), context, ids.tobytes())),
        Generate(
            request_id, attempt, detokenizer, 1, **output, frames=(_sampling(choice), context, ids.tobytes(), bytes(8))
        ),
        Begin(request_id, attempt, engine, frames=(context,)),
        Begin(request_id, attempt, engine, **output, frames=(context, ids.tobytes())),
        EngineOutputs(
            (request_id,),
            (attempt,),
            (choice.choice((0, 0, 1, 60_000)),),
            (len(ids),),
            (choice.randrange(5),),
            frames=(ids.tobytes(),),
        ),
        PromptLogprobs(request_id, attempt, choice.choice((0, 1)), 0, frames=(bytes(8), bytes(8))),
        Submit(request_id, Route.COMPLETIONS, 2, True, frames=(b"{}",)),
        Submit(request_id, Route.COMPLETIONS, 200_000_000, False, frames=(b"{",)),
        Prepare(request_id, attempt, Route.COMPLETIONS, engine, detokenizer, (b'{"prompt":"x","max_tokens":1}',)),
        Accepted(request_id, attempt, True, 1, 1, (_sampling(choice), context, ids.tobytes())),
        Rejected(request_id, attempt, 400, (b"{}",)),
        Undelivered((request_id,), (attempt,)),
        Abort(request_id, attempt),
        Heartbeat(1, 5, 10**9, True, (Metric("http_requests_total", 'code="200"', (1e300,)),)),
        Topology(10**9, (Peer("router.0.9", Role.ROUTER, ("ipc://nowhere", "ipc://nowhere"), EngineLimits()),)),
        Publish("/health", 500, "text/html", 0.0, (b"x",)),
        Stop(drain=choice.random() < 0.5),
    ]
    return [bytes(memoryview(frame)) for frame in codec.encode(choice.choice(made))]


def _sampling(choice: random.Random) -> bytes:
    def number() -> int:
        return choice.choice((-1, 0, 1, 1, 2, 40, 2**31, 2**63 - 1))

    few = tuple(number() for _ in range(choice.choice((0, 0, 1, 3))))
    return codec.encode_part(
        SamplingParams(
            n=choice.choice((1, 1, number())),
            max_tokens=choice.choice((1, 5, 5, number())),
            min_tokens=choice.choice((0, number())),
            temperature=choice.choice((0.0, 1.0, -1.0, 1e300)),
            top_k=choice.choice((0, number())),
            top_p=choice.choice((1.0, 0.0, -5.0)),
            seed=number(),
            stop_token_ids=few,
            logit_bias_ids=few,
            logit_bias_values=tuple(1e300 for _ in few[:1]),
            num_logprobs=choice.choice((-1, -1, number())),
            num_prompt_logprobs=choice.choice((-1, -1, number())),
            guide_kind=choice.choice(("", "", "regex", "nonsense")),
            guide="(",
        )
    )


def _context(choice: random.Random) -> Context:
    return Context(
        route=choice.choice((1, 1, 2, 3, 99)),
        response_id="x",
        created=1,
        model="m",
        n=choice.choice((1, 1, 2, 0, -1)),
        num_prompt_tokens=choice.choice(((1,), (1,), (), (1, 1))),
        stream=choice.random() < 0.5,
        include_usage=choice.random() < 0.5,
        continuous_usage=False,
        stop=choice.choice(((), ("a",), ("",))),
        include_stop=False,
        skip_special_tokens=True,
        min_tokens=choice.choice((0, 5)),
        bare_prompts=choice.choice(((), (5,))),
        num_logprobs=choice.choice((-1, -1, 0, 5)),
        echo=choice.random() < 0.2,
        prompt_texts=choice.choice(((), ("x",))),
        tool_format=choice.choice(("", "", "hermes", "nonsense")),
        reasoning=choice.choice(("", "", "tagged", "nonsense")),
    )


def anything(samples: list[list[bytes]], choice: random.Random) -> list[bytes]:
    """The frames of one message."""
    kind = choice.random()
    if kind < 0.2:
        return order(choice)
    if kind < 0.4:
        return choice.choice(samples)
    if kind < 0.85:
        return mutated(choice.choice(samples), choice)
    if kind < 0.99:
        return [choice.randbytes(choice.choice((0, 1, 2, 30, 2000))) for _ in range(choice.choice((1, 2, 3, 40)))]
    return [bytes((1, choice.choice((1, 20, 31, 40)))) + choice.randbytes(50), choice.randbytes(1_000_000)]


def answer(server: Server) -> str:
    """The text of a completion."""
    response = server.http.post("/v1/completions", json=BODY)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def resident_bytes(server: Server) -> int:
    """Of all processes."""
    pids = (server.process.pid, *server.pids().values())
    return sum(psutil.Process(pid).memory_info().rss for pid in pids)


def attack(server: Server, samples: list[list[bytes]], name: str, seconds: float, number: int) -> int:
    """Send to one socket for so long, and check all that was promised; returns how many messages were sent."""
    choice = random.Random(number)
    right, pids, before_bytes = answer(server), server.pids(), resident_bytes(server)
    num_sent = 0
    with Stranger(server.run_dir / name, choice) as stranger:
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            for _ in range(SENT_IN_A_ROW):
                stranger.send(anything(samples, choice))
            num_sent += SENT_IN_A_ROW
            stranger.send_raw(choice.randbytes(choice.choice((1, 20, 1000))))
            assert answer(server) == right
            assert server.pids() == pids, server.log[-3000:]
    assert answer(server) == right
    server.wait_until_status("/ready", 200)
    for gauge in ("num_requests_unfinished", "unfinished_bytes", "num_requests_running", "num_requests_waiting"):
        wait_for(lambda gauge=gauge: server.gauge(gauge) == 0, what=f"{gauge} is back at 0")  # type: ignore[misc]
    assert server.pids() == pids, server.log[-3000:]
    assert resident_bytes(server) - before_bytes < ALLOWED_GROWTH_BYTES
    assert "Traceback" not in server.log
    return num_sent


SOCKETS = ["supervisor", "router.0.1.api", "router.0.1.work", "engine.0.1.ids", "detokenizer.0.1.out"]


@pytest.mark.parametrize("name", SOCKETS)
def test_anything_at_a_socket(server: Server, samples: list[list[bytes]], name: str) -> None:
    """A second at each."""
    assert attack(server, samples, name, 1.0, number=1) > 0


def test_strangers_are_given_no_work(server: Server) -> None:
    """A peer that calls itself a worker got bodies, one that calls itself an API process a place for its requests."""
    right = answer(server)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    work, api = (f"ipc://{server.run_dir}/router.0.1.{name}" for name in ("work", "api"))
    strangers = []
    for role, slot in itertools.product((Role.TOKENIZER, Role.ENGINE, Role.DETOKENIZER), range(2)):
        identity = f"{role.label}.{slot}.77"
        strangers.append(dealer(context, work, identity, "router.0.1"))
        strangers[-1].send(Hello(identity, role, WIRE_VERSION, 1, 1000, ("ipc://nowhere",)))
    client = dealer(context, api, "api.0.77", "router.0.1")
    for number in range(20):
        client.send(Submit(f"api.0.77:{number}", Route.COMPLETIONS, 2, True, frames=(b"{}",)))
    for _ in range(20):
        assert answer(server) == right
    wait_for(lambda: server.gauge("num_requests_unfinished") == 0, what="nothing is left")
    for channel in (*strangers, client):
        assert not channel.socket.poll(0)
        channel.close()
    context.term()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SOCKETS)
def test_anything_for_long(server: Server, samples: list[list[bytes]], name: str) -> None:
    """Three minutes at each."""
    assert attack(server, samples, name, 180.0, number=2) > 0
