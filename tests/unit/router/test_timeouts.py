"""No request waits for ever."""

from __future__ import annotations

from tests.helpers.router import API, ENGINE, TOKENIZER_0, TOKENIZER_1, Bench
from tests.helpers.router import status_and_code as _code
from tokservice.router.core import BUSY_TICK_S, IDLE_TICK_S
from tokservice.wire import errors
from tokservice.wire.messages import Abort, FinishReason, Prepare, ReadyBytes


def test_waiting_too_long_for_a_tokenizer_is_503() -> None:
    bench = Bench(queue_timeout_s=5.0)
    bench.die(TOKENIZER_0, TOKENIZER_1)
    bench.submit("r")
    bench.tick(4)
    assert bench.rows("r") == []
    bench.tick(2)
    assert _code(bench.end_of("r")) == (503, "queue_timeout")
    bench.assert_empty()
    bench.live("tokenizer.0.2")
    assert bench.count(Prepare, "r") == 0


def test_a_plain_response_that_takes_too_long_is_504() -> None:
    bench = Bench(total_timeout_s=60.0)
    bench.running("r", 1, stream=False)
    bench.tick(61)
    assert _code(bench.end_of("r")) == (504, "timeout")
    assert bench.sent_to(ENGINE, Abort) == [Abort("r", 1)]
    bench.finish("r", reason=FinishReason.ABORT)
    bench.end_of("r")
    bench.assert_empty()


def test_a_stream_that_takes_too_long_ends_with_an_error_event() -> None:
    bench = Bench(total_timeout_s=60.0)
    bench.running("r", 1)
    bench.tick(61)
    assert bench.end_of("r") == (0, errors.sse_error(errors.TOTAL_TIMEOUT))


def test_an_upload_that_takes_too_long_is_504() -> None:
    bench = Bench(total_timeout_s=60.0)
    bench.submit("r", b"a", content_length=10, complete=False)
    bench.tick(61)
    assert _code(bench.end_of("r")) == (504, "timeout")
    bench.assert_empty()


def test_a_tombstone_that_nobody_ends_goes_at_last() -> None:
    bench = Bench(total_timeout_s=60.0)
    bench.running("r", 1)
    bench.client_gone("r")
    bench.tick(61)
    bench.assert_empty()
    assert bench.sent_to(API, ReadyBytes)[-1].request_ids == ("r",)


def test_a_parked_request_times_out_too() -> None:
    bench = Bench(total_timeout_s=60.0, queue_timeout_s=100.0)
    bench.running("r", 1)
    bench.die(ENGINE)
    bench.tick(61)
    assert bench.end_of("r") == (0, errors.sse_error(errors.TOTAL_TIMEOUT))
    bench.live("engine.0.2")
    bench.tick()
    bench.assert_empty()


def test_the_router_that_leaves_ends_everything_readably() -> None:
    bench = Bench()
    bench.running("stream", 1)
    bench.running("plain", 1, stream=False)
    bench.submit("upload", b"a", content_length=10, complete=False)
    bench.submit("preparing")
    bench.running("gone", 1)
    bench.client_gone("gone")
    bench.core.fail_all()
    bench._take()
    assert bench.end_of("stream") == (0, errors.sse_error(errors.DRAINING))
    for name in ("plain", "upload", "preparing"):
        assert _code(bench.end_of(name)) == (503, "shutting_down")
    assert not any(flags & 2 for _, flags, _ in bench.rows("gone"))


def test_the_router_wakes_often_only_where_something_waits() -> None:
    bench = Bench()
    assert bench.tick() == IDLE_TICK_S
    bench.running("r", 1)
    assert bench.tick() == IDLE_TICK_S
    bench.die(ENGINE)
    assert bench.tick() == BUSY_TICK_S
