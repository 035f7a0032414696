"""Engines and detokenizers die or lose messages: no accepted request is lost, and none is answered twice."""

from __future__ import annotations

import pytest

from tests.helpers.router import API, DETOKENIZER, ENGINE, TOKENIZER_0, TOKENIZER_1, Bench, ids
from tests.helpers.router import status_and_code as _code
from tokservice.router.core import BUSY_TICK_S
from tokservice.wire import errors
from tokservice.wire.messages import Abort, FinishReason, Generate, Prepare, ReadyBytes, ReadyFlags

STREAM, LAST = ReadyFlags.STREAM, ReadyFlags.LAST


@pytest.mark.parametrize("victims", [(ENGINE,), (DETOKENIZER,), (ENGINE, DETOKENIZER)])
def test_a_stream_goes_on_from_the_journal(victims: tuple[str, ...]) -> None:
    bench = Bench()
    bench.running("r", 7, 8)
    bench.progress("r", 9, data=b"more")
    bench.die(*victims)
    assert bench.rows("r")[-1] == (0, STREAM, b"more")
    for victim in victims:
        bench.live(victim[:-1] + "2")
    bench.tick()
    generate = bench.resumed("r")
    assert generate.attempt > 1
    assert generate.detokenizer in bench.living
    assert (generate.num_delivered, generate.finished) == ((3,), (FinishReason.RUNNING,))
    assert generate.frames == (b"sampling", b"context", ids(1, 2, 3), ids(7, 8, 9))
    bench.finish("r", attempt=generate.attempt)
    assert bench.end_of("r") == (0, b"end")
    bench.assert_empty()


def test_finished_choices_stay_finished() -> None:
    bench = Bench()
    bench.running("r", choices=3)
    bench.progress("r", 5, choice=1, data=b"x", reason=FinishReason.STOP)
    bench.progress("r", 6, 7, choice=2, data=b"y")
    bench.die(ENGINE)
    bench.live("engine.0.2")
    generate = bench.resumed("r")
    assert generate.num_delivered == (0, 1, 2)
    assert generate.finished == (FinishReason.RUNNING, FinishReason.STOP, FinishReason.RUNNING)
    assert generate.frames[3:] == (b"", ids(5), ids(6, 7))


def test_another_engine_takes_over_at_once() -> None:
    bench = Bench()
    bench.live("engine.1.1")
    bench.running("a", 1)
    bench.running("b", 1)
    bench.die(ENGINE)
    dead = "a" if bench.last(Prepare, "a").engine == ENGINE else "b"
    alive = "b" if dead == "a" else "a"
    assert bench.resumed(dead).attempt == 2
    assert bench.count(Generate, alive) == 0


def test_an_engine_that_lost_its_detokenizer_stops_the_old_attempt() -> None:
    """It went on to the last token for nobody when the next attempt was given to another engine."""
    bench = Bench()
    bench.live("engine.1.1", "detokenizer.1.1")
    bench.running("r", 1)
    placed = bench.last(Prepare, "r")
    bench.die(placed.detokenizer)
    assert Abort("r", 1) in bench.sent_to(placed.engine, Abort)


def test_the_detokenizer_of_an_attempt_that_was_given_up_forgets_it() -> None:
    """Its engine says no more of that attempt once it has the next: the record stayed for ever."""
    bench = Bench()
    bench.submit("r")
    bench.accept("r")
    bench.die(bench.worker_of("r"))  # the ids are sent again, perhaps to others
    assert bench.sent_to(DETOKENIZER, Abort) == [Abort("r", 1)]


def test_output_of_an_old_attempt_is_dropped_and_aborted() -> None:
    bench = Bench()
    bench.running("r", 1)
    bench.die(DETOKENIZER)
    bench.live("detokenizer.0.2")
    rows = bench.rows("r")
    bench.forget_sent()
    bench.progress("r", 2, attempt=1, data=b"stale")
    assert bench.sent_to(API, ReadyBytes) == []
    assert bench.sent_to(ENGINE, Abort) == [Abort("r", 1)]
    assert rows
    bench.die("detokenizer.0.2")
    bench.live("detokenizer.0.3")
    assert bench.resumed("r").frames[3:] == (ids(1),)


def test_an_old_end_ends_nothing() -> None:
    bench = Bench()
    bench.running("r", 1)
    bench.die(DETOKENIZER)
    bench.live("detokenizer.0.2")
    bench.finish("r", attempt=1)
    assert bench.core.num_unfinished == 1
    assert not any(flags & LAST for _, flags, _ in bench.rows("r"))


def test_the_engine_died_while_the_body_was_encoded() -> None:
    bench = Bench()
    bench.submit("r")
    bench.die(ENGINE)
    bench.live("engine.0.2")
    bench.accept("r")
    assert bench.resumed("r").attempt == 2
    assert bench.sent_to("engine.0.2", Generate)
    bench.undelivered("r", 1)  # the tokenizer found out as well
    bench.finish("r", attempt=2)
    assert bench.end_of("r") == (0, b"end")
    bench.assert_empty()


def test_what_was_not_delivered_begins_again_a_moment_later() -> None:
    bench = Bench()
    bench.running("r")
    bench.undelivered("r", 1)
    bench.progress("r", 5, attempt=1, data=b"after a gap")  # what the detokenizer made of later tokens
    assert bench.rows("r") == [(200, STREAM, b"")]
    assert bench.count(Generate, "r") == 0
    bench.tick(BUSY_TICK_S)
    generate = bench.resumed("r")
    assert generate.attempt > 1
    assert len(generate.frames) == 3
    bench.finish("r", attempt=generate.attempt)
    bench.assert_empty()


def test_undelivered_may_be_here_before_the_tokenizers_word() -> None:
    """They come on different sockets. It was ignored, and then nobody began the request: its client waited
    until the total timeout."""
    bench = Bench()
    bench.submit("r")
    bench.undelivered("r", 1)
    bench.accept("r")
    assert bench.resumed("r").attempt == 2
    bench.finish("r", attempt=2)
    bench.assert_empty()


def test_old_news_of_failed_delivery_changes_nothing() -> None:
    bench = Bench()
    bench.running("r", 1)
    bench.die(DETOKENIZER)
    bench.live("detokenizer.0.2")
    bench.forget_sent()
    bench.undelivered("r", 1)
    assert bench.sent_to(ENGINE, Generate) == []
    bench.finish("r", attempt=bench.attempt_of("r"))
    bench.assert_empty()


def test_death_while_parked() -> None:
    bench = Bench()
    bench.running("r", 1)
    bench.die(ENGINE)
    bench.die(DETOKENIZER)
    bench.die(TOKENIZER_0, TOKENIZER_1)
    bench.live("engine.0.2")
    bench.tick()
    assert bench.count(Generate, "r") == 0
    bench.live("detokenizer.0.2")
    assert bench.count(Generate, "r") == 1
    bench.finish("r", attempt=bench.resumed("r").attempt)
    bench.assert_empty()


def test_three_deaths_without_a_token_fail_the_request() -> None:
    bench = Bench()
    bench.running("r", stream=False)
    engine = ENGINE
    for incarnation in (2, 3, 4):
        assert bench.rows("r") == []
        bench.die(engine)
        engine = f"engine.0.{incarnation}"
        bench.live(engine)
    assert _code(bench.end_of("r")) == (500, "engine_error")
    bench.assert_empty()  # the abort went to a dead engine, and the record stayed


def test_two_deaths_of_either_kind_are_not_three_of_one() -> None:
    """A request that waited in an engine was given up when each of four workers was killed once."""
    bench = Bench()
    bench.running("r")
    for incarnation in (2, 3):
        for kind in ("engine", "detokenizer"):
            bench.die(f"{kind}.0.{incarnation - 1}")
            bench.live(f"{kind}.0.{incarnation}")
    bench.finish("r", attempt=bench.attempt_of("r"))
    assert bench.end_of("r") == (0, b"end")


def test_no_request_is_to_blame_for_workers_that_leave_in_peace() -> None:
    bench = Bench()
    bench.running("r")
    for incarnation in range(2, 8):
        bench.leave(f"engine.0.{incarnation - 1}", f"detokenizer.0.{incarnation - 1}")
        bench.live(f"engine.0.{incarnation}", f"detokenizer.0.{incarnation}")
    assert bench.core.num_unfinished == 1
    bench.finish("r", attempt=bench.attempt_of("r"))
    assert bench.end_of("r") == (0, b"end")


def test_a_token_between_the_deaths_clears_the_request() -> None:
    bench = Bench()
    bench.running("r")
    for incarnation in range(2, 12):
        bench.die(f"engine.0.{incarnation - 1}")
        bench.live(f"engine.0.{incarnation}")
        bench.progress("r", incarnation, attempt=bench.resumed("r").attempt, data=b"x")
    assert bench.gauges()["num_requests_unfinished"] == 1
    assert bench.core.ledger["r"].journal.outputs == [ids(*range(2, 12))]


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    bench = Bench()
    bench.running("r")
    for incarnation in (2, 3, 4):
        bench.die(f"detokenizer.0.{incarnation - 1}", over="r")
        bench.live(f"detokenizer.0.{incarnation}")
    assert bench.end_of("r") == (0, errors.sse_error(errors.ENGINE_FAILED))
    bench.assert_empty()


def test_a_ghost_that_says_hello_after_its_death_gets_no_work() -> None:
    """Its hello was read after the notice of its death: it had no load, so every later request went to it."""
    bench = Bench()
    bench.die(ENGINE, DETOKENIZER, TOKENIZER_0, TOKENIZER_1)
    for ghost in (ENGINE, DETOKENIZER, TOKENIZER_0, TOKENIZER_1):
        bench.hello(ghost)
    bench.submit("r")
    assert bench.count(Prepare, "r") == 0
    bench.live("engine.0.2", "detokenizer.0.2", "tokenizer.1.2")
    assert bench.worker_of("r") == "tokenizer.1.2"
    assert bench.last(Prepare, "r").engine == "engine.0.2"


def test_a_hello_may_be_here_before_the_topology() -> None:
    bench = Bench()
    bench.die(ENGINE)
    bench.hello("engine.0.2")
    bench.live("engine.0.2")
    bench.submit("r")
    assert bench.last(Prepare, "r").engine == "engine.0.2"


def test_load_is_gone_with_the_dead() -> None:
    bench = Bench()
    bench.live("engine.1.1")
    for number in range(8):
        bench.running(str(number), 1)
    bench.die(ENGINE)
    assert dict(bench.core.ledger.engines.loads) == {"engine.1.1": 8}
    for number in range(8):
        bench.finish(str(number), attempt=bench.attempt_of(str(number)))
    bench.assert_empty()
