"""The bodies that clients read, and what the processes know of each other's errors."""

from __future__ import annotations

import json

import pytest

from tokservice.wire import errors
from tokservice.wire.errors import PeerLost, RequestError, TokserviceError, sse_error
from tokservice.wire.messages import Route

FINISHED = {name: error for name, error in vars(errors).items() if isinstance(error, RequestError)}


@pytest.mark.parametrize("error", FINISHED.values(), ids=FINISHED)
def test_envelope(error: RequestError) -> None:
    body = json.loads(error.body())
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] == error.message == str(error)
    assert body["error"]["code"]
    assert 400 <= error.status <= 599


def test_a_stream_ends_with_the_error_and_done() -> None:
    data = sse_error(errors.ENGINE_FAILED)
    event, done, rest = data.split(b"\n\n")
    assert event == b"data: " + errors.ENGINE_FAILED.body()
    assert (done, rest) == (b"data: [DONE]", b"")


def test_a_stream_of_the_responses_api_ends_with_its_error_event() -> None:
    """Who cuts it off has not counted its events, so the number is one above them all."""
    name, data = sse_error(RequestError("a\u2028b", 500, param="p", code="c"), Route.RESPONSES).splitlines()[:2]
    assert name == b"event: error"
    told = json.loads(data.removeprefix(b"data: "))
    assert told.pop("sequence_number") == 2**31 - 1
    assert told == {"type": "error", "message": "a\u2028b", "param": "p", "code": "c"}


def test_no_line_end_gets_into_an_event() -> None:
    """A raw line end of any kind in a data line would break clients that split on it."""
    for separator in ("\n", "\r", "\u2028", "\u2029", "\x85"):
        body = RequestError(f"a{separator}b").body()
        assert separator.encode() not in body
        assert json.loads(body)["error"]["message"] == f"a{separator}b"


def test_all_are_of_one_family() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) == 6
    assert all(issubclass(kind, TokserviceError) for kind in kinds)


def test_peer_lost_names_the_peer() -> None:
    lost = PeerLost("engine.0.1", "gone")
    assert lost.identity == "engine.0.1"
    assert str(lost) == "engine.0.1: gone"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestError("x"), "invalid_request_error"),
        (errors.UNAUTHORIZED, "authentication_error"),
        (errors.METHOD_NOT_ALLOWED, "invalid_request_error"),
        (errors.BODY_TOO_LARGE, "request_too_large"),
        (errors.OVERLOADED, "rate_limit_error"),
        (errors.ENGINE_FAILED, "api_error"),
        (errors.DRAINING, "overloaded_error"),
        (errors.TOTAL_TIMEOUT, "timeout_error"),
    ],
)
def test_the_routes_of_another_api_have_its_envelope(error: RequestError, kind: str) -> None:
    expected = {"type": "error", "error": {"type": kind, "message": error.message}}
    for route in (Route.MESSAGES, Route.COUNT_TOKENS):
        assert json.loads(error.body(route)) == expected
        assert sse_error(error, route) == b"event: error\ndata: " + error.body(route) + b"\n\n"
    assert error.body(Route.COMPLETIONS) == error.body()
