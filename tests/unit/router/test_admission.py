"""Who gets in, and when."""

from __future__ import annotations

import pytest

from tests.helpers.router import API, DETOKENIZER, ENGINE, EVERYONE, ROUTER, TOKENIZER_0, TOKENIZER_1, Bench
from tests.helpers.router import status_and_code as _code
from tokservice.wire.messages import Abort, FinishReason, Prepare


def test_a_complete_body_goes_to_a_tokenizer_with_its_engine_and_detokenizer() -> None:
    bench = Bench()
    bench.submit("r", b'{"a": 1}')
    prepare = bench.last(Prepare, "r")
    assert prepare == Prepare("r", 1, 1, ENGINE, DETOKENIZER)
    assert prepare.frames == (b'{"a": 1}',)
    assert bench.rows("r") == []


def test_a_body_in_pieces_is_passed_on_in_the_same_pieces() -> None:
    bench = Bench()
    bench.submit("r", b"one", content_length=9, complete=False)
    bench.chunk("r", b"two")
    assert bench.count(Prepare, "r") == 0
    bench.chunk("r", b"six", complete=True)
    assert bench.last(Prepare, "r").frames == (b"one", b"two", b"six")


def test_an_empty_last_piece_completes_a_body() -> None:
    bench = Bench()
    bench.submit("r", b"", content_length=-1, complete=False)
    bench.chunk("r", b"one")
    bench.chunk("r", b"", complete=True)
    assert bench.last(Prepare, "r").frames == (b"one",)


def test_more_than_so_many_unfinished_requests_get_429() -> None:
    bench = Bench(max_unfinished_requests=2)
    bench.submit("a")
    bench.submit("b", b"", content_length=10, complete=False)  # an upload counts
    bench.submit("c")
    assert _code(bench.end_of("c")) == (429, "overloaded")
    bench.reject("a")
    bench.submit("d")
    assert bench.count(Prepare, "d") == 1


def test_every_refused_request_is_answered() -> None:
    """With several workers, requests that a full queue refused used to get no reply at all."""
    bench = Bench(max_unfinished_requests=5)
    for number in range(200):
        bench.submit(str(number))
    answered = [number for number in range(200) if bench.rows(str(number))]
    assert answered == list(range(5, 200))
    assert all(_code(bench.end_of(str(number))) == (429, "overloaded") for number in answered)


def test_an_announced_length_counts_before_it_arrives() -> None:
    bench = Bench(max_unfinished_bytes=1000)
    bench.submit("a", b"", content_length=600, complete=False)
    bench.submit("b", b"", content_length=600, complete=False)
    assert _code(bench.end_of("b")) == (429, "overloaded")
    assert bench.gauges()["unfinished_bytes"] == 600
    bench.client_gone("a")
    bench.submit("c", b"", content_length=600, complete=False)
    assert bench.rows("c") == []


def test_an_upload_of_unknown_length_is_ended_when_it_exceeds_the_budget() -> None:
    bench = Bench(max_unfinished_bytes=1000)
    bench.submit("a", b"x" * 600, content_length=-1, complete=False)
    bench.chunk("a", b"x" * 600)
    assert _code(bench.end_of("a")) == (429, "overloaded")
    bench.chunk("a", b"x" * 600)  # what was on its way
    bench.chunk("a", b"x", complete=True)
    assert bench.count(Prepare, "a") == 0
    bench.assert_empty()


def test_many_small_pieces_cost_more_than_their_bytes() -> None:
    bench = Bench(max_unfinished_bytes=10_000)
    bench.submit("a", b"", content_length=-1, complete=False)
    for _ in range(100):
        bench.chunk("a", b"x")
    assert _code(bench.end_of("a")) == (429, "overloaded")


def test_the_journal_counts_too() -> None:
    bench = Bench()
    bench.running("r", 1, 2, 3)
    prepared = len(b"sampling") + len(b"context") + 3 * 4
    assert bench.gauges()["unfinished_bytes"] == prepared + 3 * 4
    bench.finish("r")
    bench.assert_empty()


def test_a_tombstone_holds_a_place_but_no_bytes() -> None:
    bench = Bench(max_unfinished_requests=1)
    bench.running("r", 1)
    bench.client_gone("r")
    assert bench.gauges()["unfinished_bytes"] == 0
    bench.submit("s")
    assert _code(bench.end_of("s")) == (429, "overloaded")
    bench.finish("r", reason=FinishReason.ABORT)
    bench.submit("t")
    assert bench.count(Prepare, "t") == 1


@pytest.mark.parametrize("missing", [role for role in EVERYONE if role not in (TOKENIZER_1, API)])
def test_before_every_role_was_ready_once_there_is_503(missing: str) -> None:
    same_role = (TOKENIZER_0, TOKENIZER_1) if missing == TOKENIZER_0 else (missing,)
    bench = Bench(everyone=[identity for identity in EVERYONE if identity not in same_role])
    bench.submit("r")
    assert _code(bench.end_of("r")) == (503, "not_ready")
    bench.assert_empty()
    bench.live(*same_role)
    bench.submit("s")
    assert bench.rows("s") == []
    if missing != ROUTER:
        assert bench.count(Prepare, "s") == 1


def test_a_role_that_died_later_is_waited_for() -> None:
    bench = Bench()
    bench.die(ENGINE)
    bench.submit("r")
    assert bench.rows("r") == []
    assert bench.count(Prepare, "r") == 0
    bench.live("engine.0.2")
    assert bench.last(Prepare, "r").engine == "engine.0.2"


def test_while_draining_there_is_503_and_what_runs_goes_on() -> None:
    bench = Bench()
    bench.running("a", 1)
    bench.submit("b", b"", content_length=5, complete=False)
    bench.core.draining = True
    bench.submit("c")
    assert _code(bench.end_of("c")) == (503, "shutting_down")
    bench.chunk("b", b"12345", complete=True)
    assert bench.count(Prepare, "b") == 1
    bench.finish("a")
    assert bench.end_of("a") == (0, b"end")


def test_what_a_dead_api_process_had_sent_begins_nothing() -> None:
    """Its last messages are read after the notice of its death: an upload that nobody goes on with would hold
    its announced bytes until the total timeout."""
    bench = Bench()
    bench.die(API)
    bench.submit("r", b"", content_length=60_000_000, complete=False)
    bench.assert_empty()
    bench.live("api.0.2")
    bench.submit("s", api="api.0.2")
    assert bench.count(Prepare, "s") == 1


def test_pieces_and_aborts_of_unknown_requests_are_ignored() -> None:
    bench = Bench()
    bench.chunk("nobody", b"x", complete=True)
    bench.client_gone("nobody")
    bench.assert_empty()
    assert bench.sent_to(TOKENIZER_0, Abort) == []


def test_pieces_after_the_last_are_ignored() -> None:
    bench = Bench()
    bench.submit("r", b"whole")
    bench.chunk("r", b"more", complete=True)
    assert bench.count(Prepare, "r") == 1
