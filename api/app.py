"""What the HTTP process decides by itself, from the request line and the headers alone.

Routes, API keys, body size, content type; everything else is the router's and the workers' business. No body
is parsed here, and no JSON is written: errors and pages are finished bytes.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Sequence

from api.backlog import Held
from api.cors import Origins
from api.exchange import SMALL_BODY_BYTES, Exchange
from api.http_connection import HttpConnection
from api.http_head import JSON
from api.pages import Pages
from api.router_client import RouterClient
from tokservice.runtime.config import ApiConfig
from tokservice.runtime.metrics import Metrics
from tokservice.wire.codec import MAX_CHUNK_BYTES
from tokservice.wire.errors import (
    BODY_TOO_LARGE,
    DRAINING,
    METHOD_NOT_ALLOWED,
    MODEL_NOT_FOUND,
    NO_ADAPTERS,
    NO_POOLING,
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
    "/generate": Route.GENERATE,
    "/tokenize": Route.TOKENIZE,
    "/detokenize": Route.DETOKENIZE,
    "/v1/messages": Route.MESSAGES,
    "/v1/messages/count_tokens": Route.COUNT_TOKENS,
    "/v1/responses": Route.RESPONSES,
}
OPEN_PATHS = {"/health", "/ready", "/metrics", "/version", "/openapi.json", "/docs"}  # no API key needed
REFUSED_PATHS = {  # known from other servers
    "/v1/embeddings": NO_POOLING,
    "/v1/rerank": NO_POOLING,
    "/v1/score": NO_POOLING,
    "/v1/load_lora_adapter": NO_ADAPTERS,
    "/v1/unload_lora_adapter": NO_ADAPTERS,
}
MODEL_PATHS = "/v1/models/"
HEALTH = "/health"
HEALTHY = b'{"status":"ok"}'
GET_METHODS = (b"GET", b"HEAD")
MAX_SURPLUS_CONNECTIONS = 64  # above max_connections: they are told so, and probes are still answered


class App:
    """Implements ``http_connection.Application``."""

    def __init__(
        self, settings: ApiConfig, api_keys: Sequence[bytes], router: RouterClient, pages: Pages, metrics: Metrics
    ) -> None:
        self.settings = settings
        self.origins = Origins(settings.allowed_origins) if settings.allowed_origins else None
        self.date = b""
        self.held = Held()
        self.draining = False
        self.connections: set[HttpConnection] = set()
        self._api_keys = tuple(api_keys)
        self._router = router
        self._pages = pages
        self._metrics = metrics

    def opened(self, connection: HttpConnection) -> None:
        """A client connected."""
        self.connections.add(connection)
        num_surplus = len(self.connections) - self.settings.max_connections
        connection.is_surplus = num_surplus > 0
        if num_surplus > MAX_SURPLUS_CONNECTIONS:
            connection.drop()

    def closed(self, connection: HttpConnection) -> None:
        """Its connection is gone."""
        self.connections.discard(connection)

    def drain(self) -> None:
        """Refuse what is new; what is arriving has a short while left."""
        self.draining = True
        for connection in self.connections:
            connection.hurry()

    def begin(self, exchange: Exchange) -> None:
        """A request's head is here: answer from it, or let the body come."""
        path = exchange.path
        exchange.route = ROUTES.get(path, 0)
        is_open = path in OPEN_PATHS
        if exchange.line.is_surplus:
            exchange.keep_alive = False
        if exchange.line.is_surplus and not is_open:
            exchange.respond_error(TOO_MANY_CONNECTIONS, close=True)
        elif self.origins is not None and self.origins.is_preflight(exchange.method, exchange.headers):
            exchange.respond(200, "text/plain", b"")
        elif not is_open and not self._is_authorized(exchange):
            exchange.respond_error(UNAUTHORIZED)
        elif exchange.route:
            self._begin_post(exchange)
        else:
            self._begin_get(exchange)

    def body(self, exchange: Exchange) -> None:
        """More of a body is kept: pass it on, a small one whole, a larger one as it comes, though not in crumbs."""
        if exchange.received_bytes > self.settings.max_body_bytes:
            self._router.abort(exchange)
            exchange.respond_error(BODY_TOO_LARGE, close=True)
        elif exchange.request_id:
            if exchange.complete or (len(exchange.kept) >= MAX_CHUNK_BYTES and not exchange.has_whole_body):
                self._router.body_chunk(exchange)
        elif exchange.complete:
            self._router.submit(exchange, whole=True)

    def abandoned(self, exchange: Exchange) -> None:
        """Nobody waits for the answer any more."""
        self._router.abort(exchange)

    def response_started(self, status: int) -> None:
        """A response began."""
        self._metrics.add("http_requests_total", code=status)

    def slow_reader(self) -> None:
        """A client was cut off since it did not read."""
        self._metrics.add("http_slow_readers_total")

    def make_room(self) -> None:
        """Beyond the bound whoever makes the process hold most is cut off."""
        while self.held.num_bytes > self.settings.max_unsent_total_bytes:
            max(self.connections, key=lambda connection: connection.held_bytes).cut_off()

    def _is_authorized(self, exchange: Exchange) -> bool:
        if not self._api_keys:
            return True
        scheme, _, bearer = exchange.headers.get(b"authorization", b"").partition(b" ")
        given = (bearer.strip() if scheme.lower() == b"bearer" else b"", exchange.headers.get(b"x-api-key", b""))
        # Every key is compared, so that the time says nothing about them.
        known = sum(hmac.compare_digest(key, api_key) for key in given for api_key in self._api_keys)
        return known > 0

    def _begin_post(self, exchange: Exchange) -> None:
        if exchange.method != b"POST":
            exchange.respond_error(METHOD_NOT_ALLOWED, allow=b"POST")
            return
        error = self._reason_to_refuse(exchange)
        if error is not None:
            exchange.respond_error(error, close=error in (DRAINING, BODY_TOO_LARGE))
            return
        if not 0 <= exchange.content_length <= SMALL_BODY_BYTES:
            self._router.submit(exchange, whole=False)  # admission before the body
        if not exchange.is_answered:
            exchange.invite_body()

    def _reason_to_refuse(self, exchange: Exchange) -> RequestError | None:
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

    def _begin_get(self, exchange: Exchange) -> None:
        page = self._pages.get(exchange.path, time.monotonic())
        if page is None and exchange.path != HEALTH:
            exchange.respond_error(_reason_for_absence(exchange.path))
        elif exchange.method not in GET_METHODS:
            exchange.respond_error(METHOD_NOT_ALLOWED, allow=b"GET, HEAD")
        elif page is not None:
            exchange.respond(page.status, page.content_type, page.body)
        else:
            exchange.respond(200, JSON, HEALTHY)


def _reason_for_absence(path: str) -> RequestError:
    if path.startswith(MODEL_PATHS) and path != MODEL_PATHS:
        return MODEL_NOT_FOUND
    return REFUSED_PATHS.get(path, NOT_FOUND)
