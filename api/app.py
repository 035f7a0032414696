"""What the HTTP process decides by itself, from the request line and the headers alone.

Routes, API keys, body size, content type; everything else is the router's and the workers' business. No body
is parsed here, and no JSON is written: errors and pages are finished bytes.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Sequence

from api.exchange import SMALL_BODY_BYTES, Exchange
from api.http_connection import HttpConnection
from api.pages import Pages
from api.router_client import RouterClient
from tokservice.runtime.config import ApiConfig
from tokservice.runtime.metrics import Metrics
from tokservice.wire.codec import MAX_CHUNK_BYTES
from tokservice.wire.errors import (
    BODY_TOO_LARGE,
    DRAINING,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    TOO_MANY_CONNECTIONS,
    UNAUTHORIZED,
    UNSUPPORTED_ENCODING,
    UNSUPPORTED_TYPE,
    RequestError,
)
from tokservice.wire.messages import Route

ROUTES = {
    "/v1/completions": Route.COMPLETIONS,
    "/v1/chat/completions": Route.CHAT_COMPLETIONS,
    "/tokenize": Route.TOKENIZE,
    "/detokenize": Route.DETOKENIZE,
}
OPEN_PATHS = {"/health", "/ready", "/metrics", "/version"}  # no API key needed
HEALTH = "/health"
HEALTHY = b'{"status":"ok"}'


class App:
    """Implements ``http_connection.Application``."""

    def __init__(
        self, settings: ApiConfig, api_keys: Sequence[bytes], router: RouterClient, pages: Pages, metrics: Metrics
    ) -> None:
        self.settings = settings
        self.date = b""
        self.draining = False
        self.connections: set[HttpConnection] = set()
        self._api_keys = [b"Bearer " + key for key in api_keys]
        self._router = router
        self._pages = pages
        self._metrics = metrics

    def opened(self, connection: HttpConnection) -> None:
        """A client connected."""
        self.connections.add(connection)
        if len(self.connections) > self.settings.max_connections:
            connection.refuse(TOO_MANY_CONNECTIONS)

    def closed(self, connection: HttpConnection) -> None:
        """Its connection is gone."""
        self.connections.discard(connection)

    def begin(self, exchange: Exchange) -> None:
        """A request's headers are here: answer from them, or let the body come."""
        path = exchange.path
        if path not in OPEN_PATHS and not self._is_authorized(exchange):
            exchange.respond_error(UNAUTHORIZED)
        elif path in ROUTES:
            self._begin_post(exchange, ROUTES[path])
        else:
            self._begin_get(exchange, path)

    def body(self, exchange: Exchange, data: bytes) -> None:
        """A piece of a body is here: pass it on in chunks of a size that suits a socket."""
        if exchange.received_bytes > self.settings.max_body_bytes:
            self._router.abort(exchange)
            exchange.respond_error(BODY_TOO_LARGE, close=True)
            return
        exchange.kept += data
        if exchange.complete and not exchange.request_id:
            self._router.submit(exchange, ROUTES[exchange.path], bytes(exchange.kept), complete=True)
            return
        while len(exchange.kept) >= MAX_CHUNK_BYTES:
            piece = bytes(exchange.kept[:MAX_CHUNK_BYTES])
            del exchange.kept[:MAX_CHUNK_BYTES]
            self._router.body_chunk(exchange, piece, complete=False)
        if exchange.complete:
            self._router.body_chunk(exchange, bytes(exchange.kept), complete=True)

    def abandoned(self, exchange: Exchange) -> None:
        """Nobody waits for the answer any more."""
        self._router.abort(exchange)

    def response_started(self, status: int) -> None:
        """A response began."""
        self._metrics.add("http_requests_total", code=status)

    def slow_reader(self) -> None:
        """A client was cut off since it did not read."""
        self._metrics.add("http_slow_readers_total")

    def _is_authorized(self, exchange: Exchange) -> bool:
        if not self._api_keys:
            return True
        given = exchange.headers.get(b"authorization", b"")
        # Every key is compared, so that the time says nothing about them.
        return sum(hmac.compare_digest(given, key) for key in self._api_keys) > 0

    def _begin_post(self, exchange: Exchange, route: Route) -> None:
        error = self._reason_to_refuse(exchange)
        if error is not None:
            exchange.respond_error(error, close=error in (DRAINING, BODY_TOO_LARGE))
            return
        if not 0 <= exchange.content_length <= SMALL_BODY_BYTES:
            self._router.submit(exchange, route, b"", complete=False)  # admission comes before the body
        if not exchange.is_answered:
            exchange.invite_body()

    def _reason_to_refuse(self, exchange: Exchange) -> RequestError | None:
        if exchange.method != b"POST":
            return METHOD_NOT_ALLOWED
        if self.draining:
            return DRAINING
        if exchange.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            return UNSUPPORTED_ENCODING
        content_type = exchange.headers.get(b"content-type", b"application/json").partition(b";")[0].strip().lower()
        if content_type != b"application/json":
            return UNSUPPORTED_TYPE
        if exchange.content_length > self.settings.max_body_bytes:
            return BODY_TOO_LARGE
        return None

    def _begin_get(self, exchange: Exchange, path: str) -> None:
        page = self._pages.get(path, time.monotonic())
        if path != HEALTH and page is None:
            exchange.respond_error(NOT_FOUND)
        elif exchange.method not in (b"GET", b"HEAD"):
            exchange.respond_error(METHOD_NOT_ALLOWED)
        elif page is not None:
            exchange.respond(page.status, page.content_type, page.body)
        else:
            exchange.respond(200, "application/json", HEALTHY)
