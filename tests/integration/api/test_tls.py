"""What TLS adds: handshakes that fail, wait, flood or never end; certificates. All else is tested with and without."""

from __future__ import annotations

import contextlib
import gc
import socket
import ssl
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

import api.tls
from tests.helpers.api_server import ApiServer
from tests.helpers.certificates import Certificates
from tests.helpers.http_client import RawClient, TlsSocket, get, post, post_head
from tests.helpers.wait import wait_for

HELLO_PREFIX = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


@pytest.fixture
def server(certificates: Certificates) -> Iterator[ApiServer]:
    """With TLS alone."""
    with ApiServer(certificates=certificates) as api:
        yield api


def untrusting(address: tuple[str, int], **versions: ssl.TLSVersion) -> TlsSocket:
    """A connection whose client does not look at the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    for name, version in versions.items():
        setattr(context, name, version)
    context.sslsocket_class = TlsSocket
    client = context.wrap_socket(socket.create_connection(address, timeout=60))
    assert isinstance(client, TlsSocket)
    return client


def num_connections(server: ApiServer) -> int:
    """As the application counts them."""
    return server.call(lambda: len(server.app.connections))


def test_the_protocol(server: ApiServer) -> None:
    """1.3 where the client can; HTTP/1.1 is what ALPN agrees on, whatever else a client offers."""
    with untrusting(server.address) as client:
        assert client.version() == "TLSv1.3"
    with untrusting(server.address, maximum_version=ssl.TLSVersion.TLSv1_2) as client:
        assert client.version() == "TLSv1.2"
    context = server.certificates.client_context() if server.certificates else None
    assert context is not None
    context.set_alpn_protocols(["h2", "http/1.1"])
    with context.wrap_socket(socket.create_connection(server.address), server_hostname="localhost") as client:
        assert client.selected_alpn_protocol() == "http/1.1"


def test_old_protocols_are_refused(server: ApiServer) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with socket.create_connection(server.address) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain)
    server.wait_until_closed()


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x00" * 5000,
        b"\x16\x03\x01\xff\xff" + bytes(70_000),
        b"\x15\x03\x03\x00\x02\x02\x28",
        b"\x17\x03\x03\x40\x00" + bytes(16384),
    ],
    ids=["http", "zeros", "too long a record", "an alert", "data before the handshake"],
)
def test_no_handshake(server: ApiServer, data: bytes) -> None:
    """Whoever does not shake hands is counted, then let go, and nobody else is hurt."""
    with RawClient(server.address) as client:
        wait_for(lambda: num_connections(server) == 1, what="it counts from its first moment")
        client.send(data)
        with server.connect() as other:
            assert other.send(get("/health")).read_response().status == 200
        server.wait_until_closed()


def test_whoever_says_nothing_is_let_go(certificates: Certificates) -> None:
    """Nor does half a hello hold a connection for longer than the head of a request may take."""
    with (
        ApiServer(certificates=certificates, header_timeout_s=1.5) as server,
        RawClient(server.address),
        RawClient(server.address) as half,
    ):
        half.send(HELLO_PREFIX)
        wait_for(lambda: num_connections(server) == 2, what="they count from their first moment")
        with server.connect() as other:
            assert other.send(get("/health")).read_response().status == 200
        server.wait_until_closed()


@pytest.mark.parametrize("reset", [True, False])
def test_gone_in_the_handshake(server: ApiServer, reset: bool) -> None:
    for _ in range(20):
        with RawClient(server.address) as client:
            client.send(HELLO_PREFIX)
            client.close(reset=reset)
    server.wait_until_closed()


def test_handshakes_count(certificates: Certificates) -> None:
    """Connections that have not yet shaken hands are connections: the limit holds for them."""
    with ApiServer(certificates=certificates, max_connections=3) as server:
        silent = [RawClient(server.address) for _ in range(3)]
        wait_for(lambda: num_connections(server) == 3, what="they are counted")
        with server.connect() as client:
            assert client.send(post(b"{}")).read_response().status == 503
        for client in silent:
            client.close()
        server.wait_until_closed()


def test_a_request_in_the_last_word_of_the_handshake(server: ApiServer, certificates: Certificates) -> None:
    """Data that came in one packet with the client's Finished was left lying until more came."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = certificates.client_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with RawClient(server.address) as line:
        with pytest.raises(ssl.SSLWantReadError):
            client.do_handshake()
        line.send(outgoing.read())
        while True:
            incoming.write(line.socket.recv(65536))
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                pass
        client.write(get("/health"))
        data = outgoing.read()
        line.send(data[:10]).send(data[10:])
        answer = b""
        while b'{"status":"ok"}' not in answer:
            incoming.write(line.socket.recv(65536))
            with contextlib.suppress(ssl.SSLWantReadError):
                answer += client.read()


def test_a_flood_of_handshakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cost the loop the time of its arithmetic, a flood of them the sum: seconds without a beat. 500 at once, of
    the dear kind: all are served, and none of them by the loop's thread."""
    shaking = set()
    original = api.tls.TlsConnection.shake_hands

    def noted(self: api.tls.TlsConnection) -> Exception | None:
        shaking.add(threading.current_thread().name)
        return original(self)

    monkeypatch.setattr(api.tls.TlsConnection, "shake_hands", noted)
    with ApiServer(certificates=Certificates(tmp_path, trustme.KeyType.RSA)) as server:
        clients = [RawClient(server.address) for _ in range(500)]
        wait_for(lambda: num_connections(server) == 500, what="all are accepted")
        done = []

        def shake(part: list[RawClient]) -> None:
            assert server.certificates is not None
            context = server.certificates.client_context()
            for client in part:
                client.socket = context.wrap_socket(client.socket, server_hostname="localhost")
            done.extend(part)

        threads = [threading.Thread(target=shake, args=(clients[start::4],)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(done) == 500
        assert shaking == {"handshakes"}
        for client in clients:
            assert client.send(get("/health")).read_response().status == 200
            client.close()
        server.wait_until_closed()


def test_a_large_message_is_decrypted_in_turns(server: ApiServer) -> None:
    """However much a client sends, a turn of the loop decrypts a share."""
    body = bytes(range(256)) * 40_000
    with server.connect() as client:
        thread = threading.Thread(target=client.send, args=(post(body),))
        thread.start()
        upload = server.router.wait()
        thread.join()
        assert upload.body == body
        server.router.answer(upload, 200, body)
        assert client.read_response().body == body


def test_goodbye_in_both_directions(server: ApiServer) -> None:
    """A client can tell the end from a connection that was cut: the server says so, and hears it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    for headers in ((), ("Connection: close",)):
        with context.wrap_socket(socket.create_connection(server.address), suppress_ragged_eofs=False) as client:
            client.sendall(get("/health", *headers))
            while b'{"status":"ok"}' not in client.recv(65536):
                pass
            if headers:
                assert client.recv(1) == b""  # without close_notify: SSLEOFError
            client.unwrap()
    server.wait_until_closed()


def test_nothing_is_decrypted_after_our_goodbye(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that was asked for before met a session that had ended, and closed: the client's rest, unread, made it a
    reset, which could overtake the answer."""
    monkeypatch.setattr(api.tls, "TURN_BYTES", 100)
    with server.connect() as client:
        transport = server.connection_of(client)._transport
        assert isinstance(transport, api.tls.TlsConnection)
        client.send(post_head("Content-Length: 10000000") + b"x" * 400_000)

        def end_before_a_turn() -> bool:
            if transport._turn is None:
                return False
            transport.write_eof()
            return True

        wait_for(lambda: server.call(end_before_a_turn), what="there is more to decrypt")
        wait_for(lambda: server.call(lambda: transport._turn is None), what="the turn is over")
        assert not server.call(transport.is_closing)


def test_goodbye_ends_the_work(server: ApiServer) -> None:
    """TLS has its own way of closing the sending side; the socket stays open."""
    client = untrusting(server.address)
    client.sendall(post(b"{}"))
    upload = server.router.wait()
    client.setblocking(False)
    with pytest.raises(ssl.SSLWantReadError):
        client.unwrap()
    server.router.wait_for_abort(upload)
    client.close()


def test_broken_records(server: ApiServer) -> None:
    """A byte that was changed on the way ends its own connection, and the work for it."""
    client = untrusting(server.address)
    client.sendall(post(b"{}"))
    upload = server.router.wait()
    socket.socket.send(client, b"\x17\x03\x03\x00\x20" + bytes(32))
    server.router.wait_for_abort(upload)
    server.wait_until_closed()
    client.close()


def test_client_certificates(certificates: Certificates) -> None:
    with ApiServer(certificates=certificates, ssl_ca_certs=str(certificates.authority)) as server:
        with RawClient(server.address, tls=certificates.client_context(with_certificate=True)) as client:
            assert client.send(get("/health")).read_response().status == 200
        without = RawClient(server.address, tls=certificates.client_context())  # in TLS 1.3 it learns of it late
        with without, pytest.raises(ssl.SSLError, match="certificate required"):
            without.send(get("/health")).read_response()
        server.wait_until_closed()


def test_a_new_certificate(tmp_path: Path) -> None:
    """Loaded for new connections; one that cannot be loaded changes nothing."""
    certificates = Certificates(tmp_path)
    with ApiServer(certificates=certificates) as server:
        assert server.tls is not None

        def serial() -> str:
            with RawClient(server.address, tls=certificates.client_context()) as client:
                assert isinstance(client.socket, ssl.SSLSocket)
                certificate = client.socket.getpeercert()
                assert certificate is not None
                return str(certificate["serialNumber"])

        with server.connect() as old:
            first = serial()
            certificates.renew()
            assert serial() == first
            server.call(server.tls.reload)
            second = serial()
            assert second != first
            certificates.server.write_text("nonsense")
            server.call(server.tls.reload)
            assert serial() == second
            assert old.send(get("/health")).read_response().status == 200


def test_a_lost_connection_is_freed_at_once(server: ApiServer) -> None:
    """Connection and TLS refer to each other: each waited for the garbage collector."""
    gc.disable()
    try:
        with server.connect() as client:
            assert client.send(get("/health")).read_response().status == 200
            connection = server.connection_of(client)
            references: list[weakref.ref[Any]] = [weakref.ref(connection), weakref.ref(connection._transport)]
            del connection
        server.wait_until_closed()
        wait_for(lambda: not any(reference() for reference in references), what="freed")
    finally:
        gc.enable()
