"""Reads all the bytes that a connection has written as strictly as a proxy might."""

from __future__ import annotations


def check_responses(data: bytes, *, cut: bool) -> int:
    """Read responses strictly; returns how many. ``cut``: the last may be incomplete."""
    number = position = 0
    while position < len(data):
        end = data.find(b"\r\n\r\n", position)
        if end < 0:
            assert cut
            break
        lines = data[position:end].split(b"\r\n")
        position = end + 4
        version, status, _ = lines[0].split(b" ", 2)
        assert version == b"HTTP/1.1"
        assert 100 <= int(status) < 600
        if status == b"100":
            assert len(lines) == 1
            continue
        headers = dict(line.split(b": ", 1) for line in lines[1:])
        assert len(headers) == len(lines) - 1
        number += 1
        if b"transfer-encoding" in headers:
            position, whole = _skip_chunks(data, position)
        elif b"content-length" in headers:
            size = int(headers[b"content-length"])
            if data[position : position + 9] == b"HTTP/1.1 ":  # the answer to HEAD, since bodies hold no such bytes
                size = 0
            whole = len(data) - position >= size or data[position:] == b""
            position += size
        else:
            assert headers[b"connection"] == b"close"
            return number
        assert whole or cut
        if headers[b"connection"] == b"close":
            assert position >= len(data), "bytes after the last response"
    return number


def _skip_chunks(data: bytes, position: int) -> tuple[int, bool]:
    while True:
        end = data.find(b"\r\n", position)
        if end < 0:
            return len(data), False
        size = int(data[position:end], 16)
        position = end + 2 + size + 2
        if position > len(data):
            return len(data), False
        assert data[position - 2 : position] == b"\r\n"
        if not size:
            return position, True
