"""What the reader lets through, what it refuses, and that it never holds more than its limits."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from api.exchange import Exchange
from api.request_reader import MAX_HEADERS, Refused, RequestReader
from tests.helpers.http_client import chunked, get, post, post_head
from tokservice.wire.errors import BAD_HTTP, HEADERS_TOO_LARGE

MAX_HEAD_BYTES = 4096


@dataclass
class Recorder:
    """A receiver that keeps everything."""

    begun: int = 0
    heads: list[Exchange] = field(default_factory=list)
    bodies: dict[Exchange, bytes] = field(default_factory=dict)
    whole: list[Exchange] = field(default_factory=list)

    def head_begins(self) -> None:
        self.begun += 1

    def head_arrived(self, exchange: Exchange) -> None:
        self.heads.append(exchange)
        self.bodies[exchange] = b""

    def body_arrived(self, exchange: Exchange, data: bytes) -> None:
        assert exchange is self.heads[-1]
        self.bodies[exchange] += data

    def request_arrived(self, exchange: Exchange) -> None:
        assert exchange is self.heads[-1]
        self.whole.append(exchange)


def reader() -> tuple[RequestReader, Recorder]:
    """A new one."""
    recorder = Recorder()
    return RequestReader(recorder, MAX_HEAD_BYTES), recorder  # type: ignore[arg-type]


def read(data: bytes, step: int = 0) -> Recorder:
    """All of it, in pieces of ``step`` bytes."""
    it, recorder = reader()
    for start in range(0, len(data), step or len(data)):
        it.feed(data[start : start + (step or len(data))])
    return recorder


def refusal(data: bytes, step: int = 0) -> object:
    """The error with which bytes are refused."""
    with pytest.raises(Refused) as refused:
        read(data, step)
    return refused.value.error


SERIES = (
    get("/health", "X-Request-Id: 7")
    + post(b"{}")
    + post_head("Transfer-Encoding: chunked")
    + chunked(b"ab", b"c" * 17)
    + get("http://h/a%20b?c", version="1.0", method="HEAD")
)


@pytest.mark.parametrize("step", [0, 1, 2, 3, 7, 50, 101])
def test_however_the_bytes_are_cut(step: int) -> None:
    """Requests do not depend on the pieces in which they arrive."""
    recorder = read(SERIES, step)
    assert recorder.heads == recorder.whole
    assert recorder.begun == 4
    health, small, large, old = recorder.heads
    assert (health.method, health.path, health.headers[b"x-request-id"]) == (b"GET", "/health", b"7")
    assert (health.content_length, health.keep_alive, health.http_1_1) == (0, True, True)
    assert (small.method, small.content_length, recorder.bodies[small]) == (b"POST", 2, b"{}")
    assert (large.content_length, recorder.bodies[large]) == (-1, b"ab" + b"c" * 17)
    assert large.received_bytes == 19
    assert (old.method, old.path, old.http_1_1, old.keep_alive) == (b"HEAD", "/a b", False, False)


@pytest.mark.parametrize(
    ("version", "header", "kept"),
    [
        ("1.1", "X: y", True),
        ("1.1", "Connection: close", False),
        ("1.1", "Connection: Keep-Alive, Close", False),
        ("1.0", "X: y", False),
        ("1.0", "Connection: keep-alive", True),
    ],
)
def test_keep_alive(version: str, header: str, kept: bool) -> None:
    """RFC 9112, section 9.3."""
    (exchange,) = read(get("/", header, version=version)).whole
    assert exchange.keep_alive is kept


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", id="length, chunks"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", id="chunks, length"),
        pytest.param(HEAD + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", id="two lengths"),
        pytest.param(HEAD + b"Content-Length: 3, 3\r\n\r\nabc", id="list of lengths"),
        pytest.param(HEAD + b"Content-Length: +3\r\n\r\nabc", id="signed length"),
        pytest.param(HEAD + b"Content-Length: -3\r\n\r\nabc", id="negative length"),
        pytest.param(HEAD + b"Content-Length: 0x3\r\n\r\nabc", id="hexadecimal length"),
        pytest.param(HEAD + b"Content-Length: 1_0\r\n\r\n0123456789", id="Python's own length"),
        pytest.param(HEAD + b"Content-Length: \r\n\r\nabc", id="empty length"),
        pytest.param(HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n", id="length beyond 64 bits"),
        pytest.param(HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", id="unknown coding"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n", id="chunked not last"),
        pytest.param(
            HEAD + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            id="two codings",
        ),
        pytest.param(HEAD + b"Transfer-Encoding: identity\r\n\r\n", id="identity"),
        pytest.param(HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", id="vertical tab before chunked"),
        pytest.param(HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", id="blank before colon"),
        pytest.param(b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", id="chunks in HTTP/1.0"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n", id="prefixed chunk size"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\n\r\n-3\r\nabc\r\n0\r\n\r\n", id="negative chunk size"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n", id="chunk longer than said"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\nabc\n0\n\n", id="bare line ends in chunks"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"F" * 17 + b"\r\n", id="chunk beyond 64 bits"),
        pytest.param(HEAD + b"A: b\r\n c\r\n\r\n", id="folded header"),
        pytest.param(b"GET / HTTP/1.1\nHost: x\n\n", id="bare LF"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\nA: b\r\n\r\n", id="bare LF between headers"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\rA: b\r\n\r\n", id="bare CR"),
        pytest.param(HEAD + b"A: b\x00c\r\n\r\n", id="NUL in a value"),
        pytest.param(HEAD + b"A b: c\r\n\r\n", id="blank in a name"),
        pytest.param(HEAD + b": c\r\n\r\n", id="no name"),
        pytest.param(HEAD + b"\xc3\xa4: c\r\n\r\n", id="name not ASCII"),
        pytest.param(b"GET /\xc3\xa4 HTTP/1.1\r\nHost: x\r\n\r\n", id="target not ASCII"),
        pytest.param(b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n", id="blank in the target"),
        pytest.param(b"GET health HTTP/1.1\r\nHost: x\r\n\r\n", id="target without slash"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="no Host"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n", id="two Hosts"),
        pytest.param(b"GET / HTTP/0.9\r\nHost: x\r\n\r\n", id="HTTP/0.9"),
        pytest.param(b"GET /\r\n\r\n", id="no version"),
        pytest.param(b"GET / HTTP/1.2\r\nHost: x\r\n\r\n", id="HTTP/1.2"),
        pytest.param(b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", id="HTTP/2.0"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="HTTP/2 preface"),
        pytest.param(b"get / HTTP/1.1\r\nHost: x\r\n\r\n", id="method in lower case"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="TLS"),
        pytest.param(b"\x00", id="NUL"),
        pytest.param(get("/", "Connection: close") + get("/"), id="more after close"),
    ],
)
@pytest.mark.parametrize("step", [0, 1])
def test_refused(data: bytes, step: int) -> None:
    """Whatever two readers could understand in two ways, or one not at all."""
    assert refusal(data, step) is BAD_HTTP


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"Content-Length: 3 \r\n\r\n",
        HEAD + b"Content-Length:\t3\t\r\n\r\n",
        HEAD + b"Content-Length: 003\r\n\r\n",
        b"\r\n\r\n" + HEAD + b"Content-Length: 3\r\n\r\n",
        HEAD + b"A: \xff\r\nContent-Length: 3\r\n\r\n",
    ],
)
def test_odd_but_valid(head: bytes) -> None:
    """Blanks around values, empty lines before a request, obsolete bytes in values."""
    recorder = read(head + b"abc")
    assert recorder.bodies[recorder.whole[0]] == b"abc"
    assert recorder.whole[0].content_length == 3


def test_blanks_around_a_value_are_no_part_of_it() -> None:
    """RFC 9110, section 5.5: a key in x-api-key, an Expect or an Origin with a blank behind it was another one."""
    (exchange,) = read(get("/", "X-API-Key: \t key \t ", "Expect:100-continue ")).whole
    assert exchange.headers[b"x-api-key"] == b"key"
    assert exchange.expects_continue


def test_chunk_extensions_and_trailers_are_dropped() -> None:
    """A trailer never becomes a header: it could change what was decided."""
    body = b"3;a=b\r\nabc\r\n0\r\nAuthorization: Bearer x\r\nHost: y\r\n\r\n"
    recorder = read(post_head("Transfer-Encoding: chunked") + body + get("/next"))
    first, second = recorder.whole
    assert recorder.bodies[first] == b"abc"
    assert b"authorization" not in first.headers
    assert first.headers[b"host"] == b"test"
    assert second.path == "/next"


# --- limits


def test_head_of_exactly_the_limit() -> None:
    """Target, names, values and four bytes for each header count."""
    filling = MAX_HEAD_BYTES - len("/") - len("hosttest") - 4 - len("x") - 4
    assert read(get("/", f"x: {'a' * filling}")).whole
    assert refusal(get("/", f"x: {'a' * (filling + 1)}")) is HEADERS_TOO_LARGE


@pytest.mark.parametrize("step", [1, 100, 3000])
def test_a_header_that_comes_in_pieces_counts_once(step: int) -> None:
    """One of more than half of the limit was refused: it counted while it came, and again when it was whole."""
    filling = MAX_HEAD_BYTES - 100
    assert read(get("/", f"x: {'a' * filling}"), step).whole


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET /" + b"a" * 1_000_000, id="target without end"),
        pytest.param(b"GET / HTTP/1.1\r\n" + b"a" * 1_000_000, id="name without end"),
        pytest.param(b"GET / HTTP/1.1\r\nx: " + b"a" * 1_000_000, id="value without end"),
        pytest.param(b"GET / HTTP/1.1\r\n" + (b"x: " + b"a" * 1000 + b"\r\n") * 1000, id="1 MB of headers"),
        pytest.param(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 50_000, id="50,000 headers"),
        pytest.param(b"GET / HTTP/1.1\r\nx:" + b" " * 1_000_000, id="blanks without end"),
        pytest.param(
            post_head("Transfer-Encoding: chunked") + b"1\r\na\r\n0\r\nx: " + b"a" * 1_000_000, id="trailer without end"
        ),
        pytest.param(
            post_head("Transfer-Encoding: chunked") + b"1\r\na\r\n0\r\n" + b"x: y\r\n" * 50_000, id="50,000 trailers"
        ),
        pytest.param(
            post_head("Transfer-Encoding: chunked") + b"1;" + b"a" * 1_000_000, id="chunk extension without end"
        ),
        pytest.param(post_head("Transfer-Encoding: chunked") + b"0" * 1_000_000, id="chunk size without end"),
    ],
)
@pytest.mark.parametrize("step", [1, 1000])
def test_no_more_than_the_limit_is_read(data: bytes, step: int) -> None:
    """CVE-2025-48956 and its like: a head, a trailer or a frame that never ends is cut off at the limit."""
    limit = 2 * MAX_HEAD_BYTES + 10 * MAX_HEADERS
    assert len(data) > 10 * limit
    assert refusal(data[:limit], step) in (HEADERS_TOO_LARGE, BAD_HTTP)


def test_number_of_headers() -> None:
    """Many small headers cost more memory than their bytes."""
    names = [f"x{number}: 1" for number in range(MAX_HEADERS - 1)]  # and Host
    assert read(get("/", *names)).whole
    assert refusal(get("/", *names, "y: 1")) is HEADERS_TOO_LARGE
    assert refusal(get("/", *(["x: 1"] * MAX_HEADERS))) is HEADERS_TOO_LARGE


def test_a_long_body_in_small_pieces_is_no_large_head() -> None:
    """Only bytes that neither are body nor end a header count."""
    body = chunked(*[b"abc"] * 5000)
    recorder = read(post_head("Transfer-Encoding: chunked") + body, 1)
    assert recorder.whole[0].received_bytes == 15_000
    recorder = read(post(b"a" * 100_000), 10)
    assert recorder.whole[0].received_bytes == 100_000


# --- other protocols


@pytest.mark.parametrize("step", [0, 1, 5])
@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_a_body_behind_an_upgrade_header(step: int, framing: str) -> None:
    """Java's HttpClient asks for h2c with every first request: its body was taken for the other protocol's bytes."""
    headers = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAB")
    if framing == "length":
        data = post(b'{"a":1}', *headers)
    else:
        data = post_head(*headers, "Transfer-Encoding: chunked") + chunked(b'{"a"', b":1}")
    recorder = read(data, step)
    (exchange,) = recorder.whole
    assert recorder.begun == 1
    assert recorder.bodies[exchange] == b'{"a":1}'
    assert exchange.method == b"POST"
    assert not exchange.keep_alive


@pytest.mark.parametrize("method", ["GET", "POST", "CONNECT"])
def test_bytes_behind_an_upgrade_without_body(method: str) -> None:
    """They may be of the other protocol: they are never taken for a request."""
    it, recorder = reader()
    target = "host:1" if method == "CONNECT" else "/"
    with pytest.raises(Refused):
        it.feed(get(target, "Connection: Upgrade", "Upgrade: websocket", method=method) + get("/health"))
    (exchange,) = recorder.whole
    assert not exchange.keep_alive


def test_an_upgrade_header_alone_changes_nothing() -> None:
    """Without ``Connection: upgrade`` it is no request to upgrade."""
    recorder = read(get("/", "Upgrade: h2c") + get("/next"))
    assert [exchange.keep_alive for exchange in recorder.whole] == [True, True]


# --- errors of the receiver


def test_what_the_receiver_raises_passes_through() -> None:
    """A fault of ours must be seen as such, not answered as the client's (400)."""

    class Faulty(Recorder):
        def head_arrived(self, exchange: Exchange) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        RequestReader(Faulty(), MAX_HEAD_BYTES).feed(get("/"))  # type: ignore[arg-type]


def test_refusals_hold_no_memory() -> None:
    """The errors are shared constants: raised themselves, their tracebacks would grow with every refusal."""
    for _ in range(100):
        refusal(b"\x00")
    assert BAD_HTTP.__traceback__ is None


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
@pytest.mark.parametrize("step", [1000, 65_536, 70_000, 1_000_000])
def test_a_long_body_passes_whole_and_what_follows_is_parsed(connection: str, step: int) -> None:
    """It does not go through the parser, which another one replaces: no byte of it may be lost, or be taken for the
    next request."""
    body = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 8000
    recorder = read(post_head(f"Content-Length: {len(body)}", f"Connection: {connection}") + body, step)
    assert recorder.whole == recorder.heads == list(recorder.bodies)
    assert recorder.bodies[recorder.heads[0]] == body
    if connection == "keep-alive":
        two = read((post_head(f"Content-Length: {len(body)}") + body) * 2 + get("/health"), step)
        assert [two.bodies[exchange] for exchange in two.whole] == [body, body, b""]
        assert two.whole[-1].path == "/health"
        assert refusal(post_head(f"Content-Length: {len(body)}") + body + b"nonsense\r\n\r\n", step) is BAD_HTTP
