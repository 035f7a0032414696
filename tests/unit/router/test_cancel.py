"""A client goes away, or its API process does: the work stops wherever it is, and no record stays."""

from __future__ import annotations

import pytest

from tests.helpers.router import API, DETOKENIZER, ENGINE, TOKENIZER_0, TOKENIZER_1, Bench
from tokservice.wire import errors
from tokservice.wire.messages import Abort, FinishReason, Generate, Prepare, ReadyBytes, ReadyFlags


def _uploading(bench: Bench) -> None:
    bench.submit("r", b"abc", content_length=1000, complete=False)


def _queued(bench: Bench) -> None:
    bench.die(TOKENIZER_0, TOKENIZER_1)
    bench.submit("r")


def _preparing(bench: Bench) -> None:
    bench.submit("r")


def _running(bench: Bench) -> None:
    bench.running("r", 1, 2)


def _parked(bench: Bench) -> None:
    bench.running("r", 1, 2)
    bench.die(ENGINE)


STATES = [_uploading, _queued, _preparing, _running, _parked]


@pytest.mark.parametrize("reach", STATES)
def test_nothing_more_is_said_to_a_client_that_is_gone(reach: object) -> None:
    bench = Bench()
    reach(bench)  # type: ignore[operator]
    bench.forget_sent()
    bench.client_gone("r")
    bench.tick(1)
    assert bench.sent_to(API, ReadyBytes) == []
    assert bench.gauges()["unfinished_bytes"] == 0


@pytest.mark.parametrize("reach", STATES)
def test_an_api_process_that_dies_cancels_what_it_had(reach: object) -> None:
    bench = Bench()
    bench.live("api.1.1")
    reach(bench)  # type: ignore[operator]
    bench.submit("other", api="api.1.1")
    bench.forget_sent()
    bench.die(API)
    assert bench.sent_to(API, ReadyBytes) == []
    aborted = [message.request_id for _, message in bench.sent if isinstance(message, Abort)]
    assert set(aborted) <= {"r"}
    assert bool(aborted) == (reach in (_preparing, _running))


@pytest.mark.parametrize("reach", [_uploading, _queued, _parked])
def test_where_no_worker_has_it_the_record_goes_at_once(reach: object) -> None:
    bench = Bench()
    reach(bench)  # type: ignore[operator]
    bench.client_gone("r")
    bench.assert_empty()
    bench.live("tokenizer.0.2", "engine.0.2")
    bench.tick(1)
    assert bench.count(Generate, "r") == bench.count(Prepare, "r") - (reach is _parked) == 0


def test_while_it_waits_in_a_tokenizers_inbox() -> None:
    bench = Bench()
    _preparing(bench)
    bench.client_gone("r")
    assert bench.sent_to(bench.worker_of("r"), Abort) == [Abort("r", 1)]
    bench.reject("r", status=499)
    assert bench.rows("r") == []
    bench.assert_empty()


def test_while_it_is_being_encoded() -> None:
    """A running encode is not interrupted; what comes of it is aborted in the engine."""
    bench = Bench()
    _preparing(bench)
    bench.client_gone("r")
    bench.accept("r")
    assert bench.sent_to(ENGINE, Abort) == [Abort("r", 1)]
    bench.finish("r", reason=FinishReason.ABORT)
    assert bench.rows("r") == []
    bench.assert_empty()


def test_while_it_runs() -> None:
    bench = Bench()
    _running(bench)
    bench.forget_sent()
    bench.client_gone("r")
    assert bench.sent_to(ENGINE, Abort) == [Abort("r", 1)]
    bench.progress("r", 3, data=b"late")
    assert bench.core.num_unfinished == 1
    bench.finish("r", reason=FinishReason.ABORT)
    assert bench.sent_to(API, ReadyBytes) == []
    bench.assert_empty()


def test_it_is_aborted_once() -> None:
    bench = Bench()
    _running(bench)
    bench.client_gone("r")
    bench.client_gone("r")
    assert len(bench.sent_to(ENGINE, Abort)) == 1


@pytest.mark.parametrize("victim", [ENGINE, DETOKENIZER])
def test_a_tombstone_ends_with_its_worker(victim: str) -> None:
    bench = Bench()
    _running(bench)
    bench.client_gone("r")
    bench.die(victim)
    bench.assert_empty()


def test_a_tombstone_ends_with_its_tokenizer() -> None:
    bench = Bench()
    _preparing(bench)
    bench.client_gone("r")
    bench.die(bench.worker_of("r"))
    bench.assert_empty()
    bench.tick(1)
    assert bench.count(Prepare, "r") == 1


@pytest.mark.parametrize("victim", [ENGINE, DETOKENIZER])
def test_accepted_after_the_client_went_and_the_engine_died(victim: str) -> None:
    """The abort went to a dead engine, whose death had been dealt with: the tombstone stayed for an hour."""
    bench = Bench()
    _preparing(bench)
    bench.client_gone("r")
    bench.die(victim)
    bench.accept("r")
    bench.assert_empty()


def test_the_api_process_and_the_engine_die_at_once() -> None:
    """Only the first was looked at: the abort went to the dead engine and the tombstone stayed."""
    bench = Bench()
    _running(bench)
    bench.die(API, ENGINE)
    bench.assert_empty()


def test_the_api_process_and_the_tokenizer_die_at_once() -> None:
    bench = Bench()
    _preparing(bench)
    bench.die(API, bench.worker_of("r"))
    bench.assert_empty()


def test_a_cancelled_request_that_was_never_delivered() -> None:
    bench = Bench()
    _running(bench)
    bench.client_gone("r")
    bench.undelivered("r", 1)
    bench.assert_empty()


def test_a_cancelled_request_that_was_never_delivered_and_whose_tokenizer_says_so_later() -> None:
    bench = Bench()
    _preparing(bench)
    bench.client_gone("r")
    bench.undelivered("r", 1)
    bench.accept("r")
    bench.assert_empty()


def test_a_client_that_is_too_far_behind_gets_an_end_instead_of_a_gap() -> None:
    bench = Bench()
    bench.running("r", 1)
    lost = ReadyBytes(("r",), (0,), (ReadyFlags.STREAM,), (1,), (b"x",))
    bench.core.bytes_lost(lost)
    bench._take()
    assert bench.end_of("r") == (0, errors.sse_error(errors.INTERNAL))
    assert bench.sent_to(ENGINE, Abort) == [Abort("r", 1)]
    bench.core.bytes_lost(lost)  # once
    bench._take()
    bench.end_of("r")
    bench.finish("r", reason=FinishReason.ABORT)
    bench.assert_empty()


def test_a_stream_whose_head_was_lost_fails_with_a_status() -> None:
    bench = Bench()
    bench.running("r")
    bench.core.bytes_lost(ReadyBytes(("r",), (200,), (ReadyFlags.STREAM,), (0,), (b"",)))
    bench._take()
    assert bench.end_of("r") == (500, errors.INTERNAL.body())


def test_hundreds_of_clients_leave_at_every_stage() -> None:
    """Records deleted before the abort was sent used to leave zombies decoding in the engine."""
    bench = Bench(capacity=300)
    for number in range(300):
        bench.submit(str(number))
        if number % 3:
            bench.accept(str(number))
        if number % 3 == 2:
            bench.progress(str(number), 1, data=b"x")
        bench.client_gone(str(number))
    aborted = {message.request_id for message in bench.sent_to(ENGINE, Abort)}
    assert aborted == {str(number) for number in range(300) if number % 3}
    for number in range(300):
        if number % 3:
            bench.finish(str(number), reason=FinishReason.ABORT)
        else:
            bench.reject(str(number), status=499)
    bench.assert_empty()
