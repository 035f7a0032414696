"""Tokenizer workers die or hang: no body is lost, and none is answered twice."""

from __future__ import annotations

import pytest

from tests.helpers.router import ENGINE, TOKENIZER_0, TOKENIZER_1, Bench, ids
from tests.helpers.router import status_and_code as _code
from tokservice.router.tokenizer_pool import DEADLINE_BASE_S
from tokservice.wire.messages import Abort, Generate, Prepare, Rejected


def test_the_bodies_of_a_dead_tokenizer_go_to_another_with_a_higher_attempt() -> None:
    bench = Bench()
    bench.submit("r", b"body")
    first = bench.worker_of("r")
    bench.die(first)
    if first == TOKENIZER_1:  # the one that is left takes no suspects
        bench.live("tokenizer.1.2")
    assert bench.worker_of("r") != first
    again = bench.last(Prepare, "r")
    assert again.attempt > 1
    assert again.frames == (b"body",)
    assert bench.rows("r") == []


def test_the_suspect_runs_alone_and_the_others_do_not() -> None:
    bench = Bench()
    bench.die(TOKENIZER_0)  # all four go to the other
    for name in "abcd":
        bench.submit(name)
    bench.die(TOKENIZER_1)
    bench.live("tokenizer.1.2")
    assert [bench.count(Prepare, name) for name in "abcd"] == [1, 2, 2, 2]  # the short ones first
    for name in "bcd":
        bench.reject(name)
    assert bench.count(Prepare, "a") == 2
    bench.submit("e")
    assert bench.count(Prepare, "e") == 0
    bench.reject("a")
    assert bench.count(Prepare, "e") == 1


def test_a_body_that_ends_two_workers_is_quarantined() -> None:
    bench = Bench()
    bench.submit("r")
    bench.die(TOKENIZER_0)
    bench.die(TOKENIZER_1)
    bench.live("tokenizer.1.2")
    if not bench.rows("r"):
        bench.die("tokenizer.1.2")
    assert _code(bench.end_of("r")) == (500, "quarantined")
    bench.assert_empty()


def test_a_body_that_no_dead_worker_had_begun_is_not_suspect() -> None:
    """Two workers killed at once: the body was sent to the second before its death was known, and got a 500."""
    bench = Bench()
    bench.submit("r")
    bench.die(TOKENIZER_0)
    bench.die(TOKENIZER_1, idle=True)
    bench.live("tokenizer.1.2")
    bench.accept("r")
    bench.finish("r", attempt=bench.attempt_of("r"))
    assert bench.end_of("r") == (0, b"end")


def test_an_innocent_neighbour_of_two_deaths_is_not_quarantined() -> None:
    bench = Bench()
    bench.die(TOKENIZER_0)
    bench.submit("guilty")
    bench.submit("innocent")
    bench.die(TOKENIZER_1)
    bench.live("tokenizer.1.2")
    bench.accept("innocent")
    assert bench.worker_of("guilty") == "tokenizer.1.2"
    bench.die("tokenizer.1.2")
    assert _code(bench.end_of("guilty")) == (500, "quarantined")
    bench.finish("innocent", attempt=bench.attempt_of("innocent"))  # its ids were sent again, to be sure
    assert bench.end_of("innocent") == (0, b"end")


@pytest.mark.parametrize("verb", ["accept", "reject", "answer"])
def test_the_last_word_of_a_dead_tokenizer_comes_too_late(verb: str) -> None:
    """Its body was queued again, with the attempt that the late word named: the request was ended while it
    still stood in the queue, and its dispatch ended the router."""
    bench = Bench()
    bench.die(TOKENIZER_0)
    bench.submit("r")
    bench.die(TOKENIZER_1)
    getattr(bench, verb)("r")
    assert bench.rows("r") == []
    assert bench.core.num_unfinished == 1
    bench.live("tokenizer.1.2")
    assert bench.last(Prepare, "r").frames == (b"{}",)
    bench.reject("r")
    assert bench.end_of("r") == (400, b"bad")
    bench.assert_empty()


def test_a_tokenizer_that_dies_between_its_word_and_the_engine() -> None:
    """Whether the ids were sent cannot be known: they are sent again, and a second arrival changes nothing."""
    bench = Bench()
    bench.submit("r")
    bench.accept("r")
    bench.die(bench.worker_of("r"))
    generate = bench.resumed("r")
    assert generate.attempt == 2
    assert generate.frames == (b"sampling", b"context", ids(1, 2, 3))
    bench.progress("r", 9, attempt=1, data=b"stale")  # they had been sent after all
    bench.finish("r", attempt=2)
    assert [data for _, _, data in bench.rows("r")] == [b"", b"end"]
    bench.assert_empty()


def test_a_tokenizer_that_dies_later_does_not_matter() -> None:
    bench = Bench()
    bench.running("r", 1)
    bench.die(TOKENIZER_0, TOKENIZER_1)
    assert bench.sent_to(ENGINE, Generate) == []
    bench.finish("r")
    bench.assert_empty()


def test_output_shows_that_the_ids_had_arrived() -> None:
    bench = Bench()
    bench.submit("r")
    bench.progress("r", 1, data=b"x", status=200)
    bench.die(TOKENIZER_0, TOKENIZER_1)
    assert bench.count(Prepare, "r") == 1
    bench.accept("r")  # it was only late
    bench.die(ENGINE)
    bench.live("engine.0.2")
    assert bench.resumed("r").num_delivered == (1,)


def test_a_tokenizer_that_misses_its_deadline_gives_up_its_bodies() -> None:
    bench = Bench()
    bench.submit("r")
    slow = bench.worker_of("r")
    bench.tick(DEADLINE_BASE_S + 1)
    assert bench.sent_to(slow, Abort) == [Abort("r", 1)]  # it need not begin what others do
    if slow == TOKENIZER_1:
        bench.live("tokenizer.2.1")
    other = bench.worker_of("r")
    assert other != slow
    bench.forget_sent()
    bench.accept("r", attempt=1, worker=slow)  # it wakes up
    assert bench.sent_to(ENGINE, Abort) == [Abort("r", 1)]
    assert bench.rows("r") == []
    bench.accept("r", attempt=bench.attempt_of("r"), worker=other)
    bench.finish("r", attempt=bench.attempt_of("r"))
    assert bench.end_of("r") == (0, b"end")
    bench.assert_empty()


def test_a_late_word_of_a_stalled_tokenizer_while_the_body_waits() -> None:
    bench = Bench()
    bench.die(TOKENIZER_0)
    bench.submit("r")
    bench.tick(DEADLINE_BASE_S + 1)
    bench.core.rejected(TOKENIZER_1, Rejected("r", 1, 400, (b"late",)), bench.now)
    bench._take()
    assert bench.rows("r") == []
    assert bench.last(Prepare, "r").attempt > 1  # it is alive, so it may try again
    bench.reject("r")
    assert bench.end_of("r") == (400, b"bad")
    bench.assert_empty()


def test_a_body_that_stalls_two_workers_is_quarantined() -> None:
    """It went from worker to worker and stalled them all, for as long as its client waited."""
    bench = Bench()
    bench.submit("r")
    for _ in range(2):
        bench.tick(DEADLINE_BASE_S + 1)
        bench.live(f"tokenizer.2.{int(bench.now)}")
    assert _code(bench.end_of("r")) == (500, "quarantined")
    bench.assert_empty()


def test_no_body_is_given_to_a_stalled_tokenizer() -> None:
    bench = Bench(capacity=1)
    bench.submit("a")
    bench.submit("b")
    bench.tick(DEADLINE_BASE_S + 1)
    bench.forget_sent()
    bench.submit("c")
    assert bench.count(Prepare, "c") == 0


def test_no_body_is_to_blame_for_a_tokenizer_that_leaves_in_peace() -> None:
    """Two steps of a rolling restart made a suspect of it and then ended it."""
    bench = Bench()
    bench.die(TOKENIZER_0)
    bench.submit("r")
    bench.submit("s")
    for incarnation in range(2, 6):
        bench.leave(f"tokenizer.1.{incarnation - 1}")
        bench.live(f"tokenizer.1.{incarnation}")
        assert bench.worker_of("r") == bench.worker_of("s") == f"tokenizer.1.{incarnation}"
    bench.reject("r")
    assert bench.end_of("r") == (400, b"bad")
