"""Which web pages may read the answers (CORS, the Fetch standard's section 3.3). Pure; API process.

Credentials in its sense (cookies) are never allowed: API keys travel in headers that a page has to name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_EXPOSED = b"\r\naccess-control-expose-headers: x-request-id, request-id, retry-after"
_PREFLIGHT = b"\r\naccess-control-allow-methods: GET, HEAD, POST\r\naccess-control-max-age: 600"
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, \t-]{1,4096}")  # a list of tokens (RFC 9110, section 5.6.2)


class Origins:
    """The origins that are allowed; '*' allows all."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._any = "*" in allowed
        self._allowed = frozenset(origin.encode() for origin in allowed)

    def is_preflight(self, method: bytes, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a browser asks what a page may do, before it does it; such a request bears no key."""
        is_asking = method == b"OPTIONS" and b"access-control-request-method" in headers
        return is_asking and self._allows(headers.get(b"origin", b""))

    def headers(self, method: bytes, headers: Mapping[bytes, bytes]) -> bytes:
        """Lines for a response, each with its line break before it. ``headers`` are those of the request."""
        origin = headers.get(b"origin", b"")
        vary = b"" if self._any else b"\r\nvary: origin"
        if not self._allows(origin):
            return vary
        lines = [vary, b"\r\naccess-control-allow-origin: ", b"*" if self._any else origin, _EXPOSED]
        if self.is_preflight(method, headers):
            lines.append(_PREFLIGHT)
            wanted = headers.get(b"access-control-request-headers", b"")
            if _HEADER_NAMES.fullmatch(wanted):
                lines += (b"\r\naccess-control-allow-headers: ", wanted)  # '*' would leave out authorization
        return b"".join(lines)

    def _allows(self, origin: bytes) -> bool:
        return self._any or origin in self._allowed
