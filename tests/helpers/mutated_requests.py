"""HTTP requests, right ones and wrong ones, with bytes changed, lost and doubled."""

from __future__ import annotations

import random

from tests.helpers.http_client import chunked, get, post, post_head

SEEDS = [
    get("/health"),
    get("/v1/models?x=%20", "X-Request-Id: abc", "Accept: */*"),
    get("/metrics", method="OPTIONS"),
    get("http://host:80/health", version="1.0"),
    get("/health", "Connection: Upgrade", "Upgrade: websocket"),
    post(b'{"prompt":"x"}'),
    post(b"x" * 70_000),
    post(b"{}", "Connection: Upgrade", "Upgrade: h2c"),
    post(b"{}", "Expect: 100-continue", "Connection: close"),
    post(b"{}", "Content-Encoding: gzip"),
    post(b"{}", path="/nowhere"),
    post_head("Transfer-Encoding: chunked") + chunked(b"{", b"x" * 5000, b"}"),
    post_head("Transfer-Encoding: chunked") + b"2;a=b\r\n{}\r\n0\r\nTrailer: x\r\n\r\n",
    post_head("Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
    post_head("Content-Length: 400000") + b"x" * 2000,
    get("/health", *(f"h{number}: {number}" for number in range(300))),
    get("/health", "a: " + "b" * 9000),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
    b"\r\n\r\n",
]
TOKENS = (
    b"\r\n|\n|\r|\0| |\t|:|\r\n\r\n|HTTP/1.1|HTTP/1.0|chunked|0\r\n\r\n|Content-Length: |99999999999999999999|-1|\xff|"
    b"Transfer-Encoding: chunked\r\n|Host: a\r\n|Connection: close\r\n|Upgrade: h2c\r\n|Expect: 100-continue\r\n|"
    b"GET |POST |HEAD /health HTTP/1.1\r\n"
).split(b"|")


def mutated(choice: random.Random) -> bytes:
    """A few requests, with some bytes changed."""
    data = bytearray(b"".join(choice.choice(SEEDS) for _ in range(choice.choice((1, 1, 1, 2, 3, 8)))))
    if choice.random() < 0.02:
        return choice.randbytes(choice.randrange(5000))
    if choice.random() < 0.05:
        data = data * choice.randrange(2, 40)
    for _ in range(choice.choice((0, 0, 1, 1, 2, 5, 20))):
        start = choice.randrange(len(data) + 1) if choice.random() < 0.3 else choice.randrange(min(300, len(data)) + 1)
        match choice.randrange(4):
            case 0:
                data[start : start + 1] = choice.randbytes(1)
            case 1:
                data[start:start] = choice.choice(TOKENS)
            case 2:
                del data[start : start + choice.choice((1, 2, 10, 100))]
            case 3:
                data[start:start] = data[start : start + choice.choice((1, 10, 200))]
    return bytes(data)
