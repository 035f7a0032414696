"""The project's exceptions, and the errors that clients read.

Imports nothing but the standard library and the routes: the API process and the router, which write no JSON, send these
bodies as they are.

    TokserviceError
    |-- ConfigError      the configuration cannot be used: one line for the operator, exit code 3
    |-- StartupError     a process cannot begin its work: the same
    |-- WireError        a message from another process is malformed: dropped and counted
    |-- PeerLost         another process is gone, or so slow that it counts as gone
    `-- RequestError     the client's request cannot be served: a status and an error envelope
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from tokservice.wire.messages import Route

ANTHROPIC_ROUTES = (Route.MESSAGES, Route.COUNT_TOKENS)
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class TokserviceError(Exception):
    """Base of all errors of this project."""


class ConfigError(TokserviceError):
    """The configuration cannot be used; the message names the key."""


class StartupError(TokserviceError):
    """A process cannot begin its work; the message says what to mend."""


class WireError(TokserviceError):
    """A message from another process is malformed."""


class PeerLost(TokserviceError):
    """The process at the other end of a channel is gone, or so far behind that it counts as gone."""

    def __init__(self, identity: str, reason: str) -> None:
        super().__init__(f"{identity}: {reason}")
        self.identity = identity


@dataclass
class RequestError(TokserviceError):
    """The client's request cannot be served; rendered as the error envelope of the API that the client speaks."""

    message: str
    status: int = 400
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None

    def __str__(self) -> str:
        return self.message

    def body(self, route: int = 0) -> bytes:
        """The finished JSON body: OpenAI's envelope, on the routes of Anthropic's API that one's."""
        envelope: dict[str, object]
        if route in ANTHROPIC_ROUTES:
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            envelope = {"type": "error", "error": {"type": kind, "message": self.message}}
        else:
            error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
            envelope = {"error": error}
        return json.dumps(envelope, ensure_ascii=True, separators=(",", ":")).encode()


SSE_DONE = b"data: [DONE]\n\n"
LAST_SEQUENCE_NUMBER = 2**31 - 1  # who ends a stream from outside has not counted its events: this is after them all


def sse_error(error: RequestError, route: int = 0) -> bytes:
    """The events that end a stream which has already begun: the error, then, in most of OpenAI's API, [DONE]."""
    if route in ANTHROPIC_ROUTES:
        return b"event: error\ndata: " + error.body(route) + b"\n\n"
    if route == Route.RESPONSES:
        event = {"type": "error", "sequence_number": LAST_SEQUENCE_NUMBER, "message": error.message}
        data = json.dumps({**event, "param": error.param, "code": error.code}, separators=(",", ":")).encode()
        return b"event: error\ndata: " + data + b"\n\n"
    return b"data: " + error.body() + b"\n\n" + SSE_DONE


def _server_error(status: int, message: str, code: str, kind: str = "server_error") -> RequestError:
    return RequestError(message, status=status, type=kind, code=code)


# Errors that no worker is needed for.
UNAUTHORIZED = RequestError("Invalid or missing API key.", 401, "authentication_error", code="invalid_api_key")
NOT_FOUND = RequestError("Unknown path.", 404, code="not_found")
MODEL_NOT_FOUND = RequestError(
    "The model does not exist; GET /v1/models lists what is served.", 404, param="model", code="model_not_found"
)
NO_POOLING = RequestError("This server generates: it makes no embeddings, scores or ranks.", 404, code="unsupported")
NO_ADAPTERS = RequestError("This server loads no adapters: it serves one model as it is.", 404, code="unsupported")
METHOD_NOT_ALLOWED = RequestError("Method not allowed on this path.", 405, code="method_not_allowed")
REQUEST_TIMEOUT = RequestError("The request's body did not arrive in time.", 408, code="request_timeout")
BODY_TOO_LARGE = RequestError("The request's body is larger than this server accepts.", 413, code="body_too_large")
UNSUPPORTED_ENCODING = RequestError(
    "Compressed bodies are not supported: send the JSON as it is.", 415, code="unsupported_content_encoding"
)
UNSUPPORTED_TYPE = RequestError(
    "The body must be JSON: send the header 'Content-Type: application/json'.", 415, code="unsupported_content_type"
)
OVERLOADED = RequestError("Too many unfinished requests: try again later.", 429, "rate_limit_error", code="overloaded")
HEADERS_TOO_LARGE = RequestError("The request's headers are too large.", 431, code="headers_too_large")
BAD_HTTP = RequestError("The request is not valid HTTP/1.1.", 400, code="bad_http")
CLIENT_GONE = RequestError("The client closed the connection.", 499, code="client_closed")
INTERNAL = _server_error(500, "Internal error.", "internal_error")
POISON = _server_error(500, "Processing this request ended its worker twice: it is not tried again.", "quarantined")
ANSWER_TOO_LARGE = RequestError(
    "The answer is too large to be sent at once: ask for less of it, or for a stream.", code="answer_too_large"
)
GUIDE_FAILED = RequestError(
    "The output cannot follow the schema, expression or grammar of this request: too complex, or no token is left.",
    code="guide_failed",
)
ENGINE_FAILED = _server_error(500, "The engine failed on this request.", "engine_error")
ROUTER_LOST = _server_error(500, "The router restarted: send the request again.", "router_restarted")
NOT_READY = _server_error(503, "The server is not ready yet: try again later.", "not_ready", "service_unavailable")
DRAINING = _server_error(503, "The server is shutting down.", "shutting_down", "service_unavailable")
TOO_MANY_CONNECTIONS = _server_error(503, "Too many open connections.", "too_many_connections", "service_unavailable")
QUEUE_TIMEOUT = _server_error(503, "The request waited too long for a worker.", "queue_timeout", "service_unavailable")
TOTAL_TIMEOUT = _server_error(504, "The request took too long.", "timeout", "timeout_error")
