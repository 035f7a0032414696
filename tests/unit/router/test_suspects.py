"""Requests that end their engine or detokenizer each time: they alone are given up."""

from __future__ import annotations

import json

from tests.helpers.router import DETOKENIZER, ENGINE, TOKENIZER_1, Bench
from tokservice.router.core import BUSY_TICK_S
from tokservice.wire.messages import Generate, Prepare

NAMES = "abcd"


def _die_and_return(bench: Bench, kind: str = "engine") -> None:
    """The one worker of a kind, of slot 0."""
    worker = next(name for name in bench.living if name.startswith(kind))
    bench.die(worker)
    bench.live(f"{kind}.0.{int(worker.split('.')[2]) + 1}")


def _suspects(names: str = NAMES) -> Bench:
    """All are suspect, and the first of them is on trial."""
    bench = Bench(capacity=8)
    for name in names:
        bench.running(name)
    for _ in range(2):
        _die_and_return(bench)
    return bench


def _at_work(bench: Bench, names: str = NAMES) -> str:
    """Those that have an engine and a detokenizer."""
    return "".join(name for name in names if name not in bench.core.ledger.parked)


def _give_token(bench: Bench, name: str) -> None:
    bench.progress(name, 1, attempt=bench.attempt_of(name), data=b"x")


def test_after_one_death_all_go_on_at_once() -> None:
    bench = Bench(capacity=8)
    for name in NAMES:
        bench.running(name)
    _die_and_return(bench)
    assert _at_work(bench) == NAMES


def test_suspects_are_tried_one_by_one() -> None:
    """A poison took its batch-mates with it: three deaths were counted for all."""
    bench = _suspects()
    for index, name in enumerate(NAMES):
        bench.tick(BUSY_TICK_S)
        assert _at_work(bench) == NAMES[: index + 1]
        _give_token(bench, name)  # at once the next one is tried
    for name in NAMES:
        bench.finish(name, attempt=bench.attempt_of(name))
    bench.assert_empty()


def test_a_detokenizer_says_what_it_died_over() -> None:
    """Requests that had no token yet, since the engine was busy, were given up when a third detokenizer was killed."""
    bench = Bench(capacity=8)
    for name in NAMES:
        bench.running(name)
    for incarnation in (2, 3, 4):
        assert _at_work(bench) == NAMES
        bench.die(f"detokenizer.0.{incarnation - 1}", over="c")
        bench.live(f"detokenizer.0.{incarnation}")
    assert b"engine_error" in bench.end_of("c")[1]
    assert _at_work(bench, "abd") == "abd"
    for name in "abd":
        bench.finish(name, attempt=bench.attempt_of(name))
        assert bench.end_of(name) == (0, b"end")
    bench.assert_empty()


def test_poison_is_given_up_alone() -> None:
    """c ends the engine whenever it gets there: with all others, beside those that were cleared, and alone."""
    bench = _suspects()
    deaths = 2
    for _ in range(20):
        at_work = _at_work(bench)
        if bench.core.ledger.find("c") is None:
            break
        if "c" in at_work:
            _die_and_return(bench)
            deaths += 1
        else:
            _give_token(bench, at_work[-1])
    status, data = bench.end_of("c")
    assert (status, json.loads(data.partition(b"data: ")[2].partition(b"\n")[0])["error"]["code"]) == (
        0,
        "engine_error",
    )
    assert deaths == 4
    for name in "abd":
        _give_token(bench, name)
    bench.tick(BUSY_TICK_S)
    for name in "abd":
        bench.finish(name, attempt=bench.attempt_of(name))
        assert bench.end_of(name) == (0, b"end")
    bench.assert_empty()


def test_nobody_joins_a_suspect() -> None:
    """Neither new requests nor those that go on from elsewhere; they wait, and go on when it is cleared."""
    bench = _suspects("a")
    bench.submit("new")
    assert bench.count(Prepare, "new") == 0
    _give_token(bench, "a")
    bench.tick(BUSY_TICK_S)
    assert bench.count(Prepare, "new") == 1


def test_another_engine_goes_on_as_ever() -> None:
    bench = _suspects("a")
    bench.live("engine.1.1")
    bench.submit("new")
    assert bench.last(Prepare, "new").engine == "engine.1.1"
    bench.accept("new")
    bench.die("engine.0.3")  # a was alone on it, for the third time
    assert bench.core.ledger.find("a") is None
    assert bench.core.ledger.find("new") is not None


def test_a_suspect_waits_for_an_engine_of_its_own() -> None:
    """It ended the one engine after the other, with all that they had."""
    bench = Bench(capacity=8)
    bench.live("engine.1.1")
    bench.running("a")
    first = bench.last(Prepare, "a").engine
    second = ({ENGINE, "engine.1.1"} - {first}).pop()
    bench.running("b")  # at the second
    bench.running("c")  # at the first
    bench.die(first)
    bench.die(second)
    bench.live("engine.1.2")
    assert _at_work(bench, "abc") == "a"
    bench.live("engine.0.2")
    assert _at_work(bench, "abc") == "ac"  # b has seen one death, and waits for those that have seen two
    _give_token(bench, "a")
    assert _at_work(bench, "abc") == "abc"
    assert bench.resumed("b") in bench.sent_to("engine.1.2", Generate)


def test_a_client_that_leaves_ends_the_trial() -> None:
    """The engine was kept for a request that nobody waited for."""
    bench = _suspects("ab")
    bench.client_gone("a")
    bench.tick(BUSY_TICK_S)
    assert _at_work(bench, "b") == "b"


def test_an_attempt_that_was_given_up_may_be_to_blame() -> None:
    """The innocent was alone on the engine, as far as the router knew, and was given up for what an old attempt of
    another did there."""
    bench = _suspects("ab")
    _give_token(bench, "a")  # now b is tried beside a
    _die_and_return(bench, "detokenizer")
    assert _at_work(bench, "ab") == "b"  # but the engine may not have read that it should stop a
    _die_and_return(bench)
    assert bench.core.ledger.find("b") is not None
    _die_and_return(bench)
    assert bench.core.ledger.find("b") is None


def test_a_request_that_nobody_may_run_waits_no_longer_than_one_for_a_tokenizer() -> None:
    """It waited until the total timeout, an hour by default."""
    for stream, expected in ((False, 503), (True, 0)):
        for victim in (ENGINE, DETOKENIZER):
            bench = Bench(queue_timeout_s=5.0)
            bench.running("r", 1, stream=stream)
            bench.die(victim)
            bench.tick(4)
            assert bench.core.num_unfinished == 1
            bench.tick(2)
            status, data = bench.end_of("r")
            assert status == expected
            assert b'"code":"queue_timeout"' in data
            bench.assert_empty()


def test_those_that_wait_for_their_turn_wait_as_in_an_engine() -> None:
    """With an engine busy for minutes they got a 503 because it had died twice before."""
    bench = _suspects("ab")
    bench.tick(3000)
    assert _at_work(bench, "ab") == "a"
    _give_token(bench, "a")
    assert _at_work(bench, "ab") == "ab"


def test_each_wait_has_its_own_time() -> None:
    bench = Bench(queue_timeout_s=5.0)
    bench.die(TOKENIZER_1)
    bench.running("r", 1)
    for incarnation in (2, 3, 4):
        bench.die(f"engine.0.{incarnation - 1}")
        bench.tick(4)
        bench.live(f"engine.0.{incarnation}")
        _give_token(bench, "r")
    assert bench.core.num_unfinished == 1
