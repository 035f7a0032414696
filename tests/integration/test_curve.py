"""tcp between processes: whoever holds the keys talks, whoever does not gets nothing and harms nobody."""

from __future__ import annotations

import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from tests.helpers.wait import wait_for
from tokservice.wire import codec
from tokservice.wire.channels import Channel, dealer, listen_pull, listen_router, push
from tokservice.wire.curve import CurveContext, CurveKeys
from tokservice.wire.errors import ConfigError, PeerLost
from tokservice.wire.messages import Abort, Message, Undelivered

ANY_PORT = "tcp://127.0.0.1:*"
FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
FROM_STRANGER = Abort("from a stranger")


@pytest.fixture
def keys() -> CurveKeys:
    """Of this run."""
    return CurveKeys.generate()


@pytest.fixture
def new_context() -> Iterator[Callable[..., zmq.Context[Any]]]:
    """Makes contexts, each as another process has it; without keys a plain one."""
    made: list[zmq.Context[Any]] = []

    def new(keys: CurveKeys | None = None) -> zmq.Context[Any]:
        made.append(CurveContext(keys) if keys is not None else zmq.Context())
        return made[-1]

    yield new
    for context in made:
        context.destroy(linger=0)


def next_of(channel: Channel) -> tuple[str, Message]:
    """The next message, which must be alone."""
    got: list[tuple[str, Message]] = []

    def arrived() -> bool:
        got.extend(channel.receive())
        return bool(got)

    wait_for(arrived, what="a message")
    assert len(got) == 1
    return got[0]


def wait_until_refused(stranger: zmq.Socket[bytes]) -> Callable[[], None]:
    """To be called before connect; the function that it returns waits for the end of the handshake."""
    monitor = stranger.get_monitor_socket(FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)

    def wait() -> None:
        assert monitor.poll(60_000), "nothing became of the handshake"
        event = recv_monitor_message(monitor)["event"]
        stranger.disable_monitor()
        monitor.close()
        assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED

    return wait


def curve(public: bytes, secret: bytes, server: bytes) -> Callable[[zmq.Socket[bytes]], None]:
    """Has a socket use these keys, right or wrong."""

    def use(stranger: zmq.Socket[bytes]) -> None:
        stranger.curve_publickey, stranger.curve_secretkey, stranger.curve_serverkey = public, secret, server

    return use


def strangers(keys: CurveKeys) -> dict[str, Callable[[zmq.Socket[bytes]], None]]:
    """What they try."""
    own = CurveKeys.generate()

    def password(stranger: zmq.Socket[bytes]) -> None:
        stranger.plain_username, stranger.plain_password = b"admin", b"admin"

    return {
        "no keys": lambda _: None,
        "a password": password,
        "keys of its own, and our public one": curve(own.public, own.secret, keys.public),
        "keys of its own, and a guess": curve(own.public, own.secret, own.public),
        "our public key without the secret one": curve(keys.public, own.secret, keys.public),
    }


@pytest.mark.parametrize("listen", [listen_router, listen_pull])
@pytest.mark.parametrize("connect", [dealer, push])
def test_there_is_no_plain_tcp(new_context: Callable[..., zmq.Context[Any]], listen: Any, connect: Any) -> None:
    """Whatever a configuration says: the sockets themselves refuse."""
    with pytest.raises(ConfigError, match=r"tcp://127\.0\.0\.1:\*: only ipc can do without keys"):
        listen(new_context(), ANY_PORT)
    with pytest.raises(ConfigError, match="only ipc"):
        connect(new_context(), "tcp://127.0.0.1:9", *(("api.0.1", "router.0.1") if connect is dealer else ("x",)))


def test_holders_of_the_keys_talk(new_context: Callable[..., zmq.Context[Any]], keys: CurveKeys) -> None:
    """In both patterns, with identities, and a payload of many frames."""
    with listen_router(new_context(keys), ANY_PORT) as router, listen_pull(new_context(keys), ANY_PORT) as inbox:
        assert router.endpoint.startswith("tcp://127.0.0.1:")
        with dealer(new_context(keys), router.endpoint, "engine.0.1", "router.0.1") as peer:
            peer.send(Abort("1"))
            assert next_of(router) == ("engine.0.1", Abort("1"))
            router.send(Abort("2"), "engine.0.1")
            assert next_of(peer) == ("", Abort("2"))
        with push(new_context(keys), inbox.endpoint, "engine.0.1") as line:
            message = Undelivered(tuple(map(str, range(30_000))), tuple(range(30_000)))
            line.send(message)
            assert next_of(inbox) == ("", message)


@pytest.mark.parametrize(
    "attempt",
    [
        "no keys",
        "a password",
        "keys of its own, and our public one",
        "keys of its own, and a guess",
        "our public key without the secret one",
    ],
)
@pytest.mark.parametrize("identity", [b"", b"engine.0.1"], ids=["anonymous", "with the identity of another"])
def test_a_stranger_gets_nothing_and_harms_nobody(
    new_context: Callable[..., zmq.Context[Any]], keys: CurveKeys, attempt: str, identity: bytes
) -> None:
    """It is not connected, whatever it tries; the peer whose name it takes is, and gets what is sent to that name."""
    with listen_router(new_context(keys), ANY_PORT) as router, new_context().socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        if identity:
            stranger.routing_id = identity
        strangers(keys)[attempt](stranger)
        wait = wait_until_refused(stranger)
        stranger.connect(router.endpoint)
        stranger.send_multipart([bytes(memoryview(frame)) for frame in codec.encode(FROM_STRANGER)])
        wait()
        with pytest.raises(PeerLost):
            router.send(Abort("secret"), "engine.0.1")
        with dealer(new_context(keys), router.endpoint, "engine.0.1", "router.0.1") as peer:
            peer.send(Abort("1"))
            assert next_of(router) == ("engine.0.1", Abort("1"))
            router.send(Abort("2"), "engine.0.1")
            assert next_of(peer) == ("", Abort("2"))
        assert not stranger.poll(0)


def test_the_name_of_a_living_peer_cannot_be_taken(
    new_context: Callable[..., zmq.Context[Any]], keys: CurveKeys
) -> None:
    """Not even by a holder of the keys: the first keeps it."""
    with (
        listen_router(new_context(keys), ANY_PORT) as router,
        dealer(new_context(keys), router.endpoint, "engine.0.1", "router.0.1") as first,
    ):
        first.send(Abort("1"))
        assert next_of(router) == ("engine.0.1", Abort("1"))
        with dealer(new_context(keys), router.endpoint, "engine.0.1", "router.0.1") as second:
            second.send(FROM_STRANGER)
            for number in range(20):
                router.send(Abort(str(number)), "engine.0.1")
                assert next_of(first) == ("", Abort(str(number)))
            assert not second.socket.poll(0)
        assert not router.socket.poll(0)


def test_without_its_guard_a_socket_admits_nobody(
    new_context: Callable[..., zmq.Context[Any]], keys: CurveKeys
) -> None:
    """ZMQ by itself would take every peer that encrypts."""
    context = new_context(keys)
    assert isinstance(context, CurveContext)
    context.is_guarded = True  # though nothing was started
    with listen_router(context, ANY_PORT) as router, new_context(keys).socket(zmq.DEALER) as client:
        client.linger = 0
        curve(keys.public, keys.secret, keys.public)(client)
        wait = wait_until_refused(client)
        client.connect(router.endpoint)
        wait()


@pytest.mark.parametrize(
    "data", [b"", b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 9000]
)
def test_bytes_that_are_not_zmtp(new_context: Callable[..., zmq.Context[Any]], keys: CurveKeys, data: bytes) -> None:
    """Cut off, and forgotten."""
    with listen_router(new_context(keys), ANY_PORT) as router:
        host, port = router.endpoint.removeprefix("tcp://").split(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(20)]
        for stranger in strangers:
            stranger.sendall(data)
        with dealer(new_context(keys), router.endpoint, "engine.0.1", "router.0.1") as peer:
            peer.send(Abort("1"))
            assert next_of(router) == ("engine.0.1", Abort("1"))
        for stranger in strangers:
            stranger.close()


def test_keys_are_in_a_file_of_their_owner(tmp_path: Path) -> None:
    """New ones each time, over those of an earlier run; never in a file that was prepared for others to read."""
    path = tmp_path / "curve.keys"
    path.write_text("old")
    path.chmod(0o644)
    first, second = CurveKeys.generate(), CurveKeys.generate()
    assert len({first.public, first.secret, second.public, second.secret}) == 4
    first.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert CurveKeys.load(path) == first
    second.save(path)
    assert CurveKeys.load(path) == second


def test_a_zmq_without_curve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: capability != "curve")
    with pytest.raises(ConfigError, match=r"runtime\.transport: tcp needs CURVE, which this build of ZMQ lacks"):
        CurveKeys.generate()
