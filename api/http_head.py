"""Heads of HTTP/1.1 messages (RFC 9112). Pure; API process."""

from __future__ import annotations

import re
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import unquote_to_bytes

from tokservice.wire.messages import Buffer

_REASONS = {status.value: status.phrase for status in HTTPStatus} | {499: "Client Closed Request"}
_STATUS_LINES = {code: f"HTTP/1.1 {code} {phrase}\r\n".encode() for code, phrase in _REASONS.items()}
_RETRY_LATER = {429, 503}
_ABSOLUTE_FORM = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://[^/?]*")
_UNSAFE_IN_LABEL = re.compile(rb"[^A-Za-z0-9._:-]")
_MAX_LABEL_BYTES = 128

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"
JSON = "application/json"
KEEPALIVE = b": keep-alive\n\n"  # a comment, which readers of events skip (HTML standard, section 9.2.6)
LAST_CHUNK = b"0\r\n\r\n"


def request_path(target: bytes) -> str:
    """The path that a request target names, without query and percent signs.

    Paths are compared as a whole: ``//v1/models`` and ``/v1/models/`` are other paths than ``/v1/models``.
    A scheme and host (the absolute form, which proxies use) are dropped: this server has one name.
    """
    path = _ABSOLUTE_FORM.sub(b"", target, count=1) if not target.startswith(b"/") else target
    return unquote_to_bytes(path.partition(b"?")[0] or b"/").decode("utf-8", "replace")


def response_head(
    status: int,
    content_type: str,
    *,
    content_length: int | None,
    chunked: bool,
    keep_alive: bool,
    label: bytes,
    date: bytes,
    allow: bytes = b"",
    extra: bytes = b"",
) -> bytes:
    """Status line and headers. ``content_length`` None: the length is told by chunks or by closing.

    ``extra``: more lines, each with its line break before it.
    """
    lines = [
        _STATUS_LINES.get(status) or f"HTTP/1.1 {status} Unknown\r\n".encode(),
        b"date: ",
        date,
        b"\r\ncontent-type: ",
        content_type.encode("ascii"),
    ]
    if label:
        lines += (b"\r\nx-request-id: ", label)
    if content_length is not None:
        lines.append(b"\r\ncontent-length: %d" % content_length)
    else:
        lines.append(b"\r\ncache-control: no-cache\r\nx-accel-buffering: no")
        if chunked:
            lines.append(b"\r\ntransfer-encoding: chunked")
    if status in _RETRY_LATER:
        lines.append(b"\r\nretry-after: 1")
    if status == HTTPStatus.UNAUTHORIZED:
        lines.append(b"\r\nwww-authenticate: Bearer")
    if allow:
        lines += (b"\r\nallow: ", allow)
    if extra:
        lines.append(extra)
    lines.append(b"\r\nconnection: keep-alive\r\n\r\n" if keep_alive else b"\r\nconnection: close\r\n\r\n")
    return b"".join(lines)


def chunk(data: Buffer) -> bytes:
    """One chunk of a chunked body (RFC 9112, section 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def http_date(unix_s: float) -> bytes:
    """The value of a Date header (RFC 9110, section 5.6.7)."""
    return formatdate(unix_s, usegmt=True).encode("ascii")


def safe_label(client_id: bytes) -> bytes:
    """A client's own request id, fit to be echoed in a header and a log line."""
    return _UNSAFE_IN_LABEL.sub(b"_", client_id[:_MAX_LABEL_BYTES])
