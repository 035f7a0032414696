"""The life of a request in which nobody dies."""

from __future__ import annotations

import pytest

from tests.helpers.router import API, DETOKENIZER, ENGINE, EVERYONE, TOKENIZER_0, TOKENIZER_1, Bench, ids
from tokservice.wire.messages import (
    ALL_CHOICES,
    Abort,
    Accepted,
    FinishReason,
    Generate,
    Prepare,
    Progress,
    ReadyBytes,
    ReadyFlags,
)

STREAM, LAST = ReadyFlags.STREAM, ReadyFlags.LAST


def test_a_stream() -> None:
    bench = Bench()
    bench.submit("r")
    bench.accept("r")
    bench.progress("r", 7, data=b"one")
    bench.progress("r", 8, data=b"two")
    bench.finish("r")
    assert bench.rows("r") == [
        (200, STREAM, b""),
        (0, STREAM, b"one"),
        (0, STREAM, b"two"),
        (0, STREAM | LAST, b"end"),
    ]
    bench.assert_empty()


def test_a_plain_response_has_no_head_before_its_body() -> None:
    bench = Bench()
    bench.submit("r")
    bench.accept("r", stream=False)
    bench.progress("r", 7, flags=0)
    assert bench.rows("r") == []
    bench.progress("r", 8, data=b"{...}", status=200, reason=FinishReason.LENGTH, flags=LAST)
    assert bench.rows("r") == [(200, LAST, b"{...}")]
    bench.assert_empty()


def test_a_plain_response_can_still_fail_with_its_own_status() -> None:
    bench = Bench()
    bench.running("r", 1, stream=False)
    bench.progress("r", data=b"error", status=500, reason=FinishReason.ERROR, flags=LAST)
    assert bench.rows("r") == [(500, LAST, b"error")]


@pytest.mark.parametrize(("verb", "expected"), [("reject", (400, b"bad")), ("answer", (200, b"answer"))])
def test_a_request_that_needs_no_engine_ends_at_its_tokenizer(verb: str, expected: tuple[int, bytes]) -> None:
    bench = Bench()
    bench.submit("r")
    getattr(bench, verb)("r")
    assert bench.end_of("r") == expected
    assert bench.sent_to(ENGINE, Abort) == []
    bench.assert_empty()


def test_output_may_be_here_before_the_tokenizers_word() -> None:
    """They come on different sockets: whichever is first opens the stream, the other changes nothing."""
    bench = Bench()
    bench.submit("r")
    bench.progress("r", 7, data=b"one", status=200)
    assert bench.rows("r") == [(200, STREAM, b"one")]
    bench.accept("r")
    bench.finish("r")
    assert bench.rows("r") == [(200, STREAM, b"one"), (0, STREAM | LAST, b"end")]
    bench.assert_empty()


def test_a_request_may_be_over_before_the_tokenizers_word() -> None:
    bench = Bench()
    bench.submit("r")
    bench.finish("r", reason=FinishReason.LENGTH)
    assert bench.end_of("r") == (200, b"end")
    assert bench.gauges()["num_requests_tokenizing"] == 1  # the worker's place is not yet free
    bench.accept("r")
    bench.assert_empty()


def test_early_output_is_in_the_journal() -> None:
    bench = Bench()
    bench.submit("r")
    bench.progress("r", 7, 8, data=b"text", status=200)
    bench.accept("r", choices=2)
    bench.die(ENGINE)
    bench.live("engine.0.2")
    generate = bench.resumed("r")
    assert generate.num_delivered == (2, 0)
    assert generate.frames == (b"sampling", b"context", ids(1, 2, 3), ids(7, 8), b"")


def test_a_stop_string_aborts_the_choice_at_the_engine() -> None:
    bench = Bench()
    bench.running("r", choices=2)
    bench.progress("r", 5, choice=1, data=b"x", reason=FinishReason.STOP, flags=STREAM | ReadyFlags.STOPPED)
    assert bench.sent_to(ENGINE, Abort) == [Abort("r", 1, 1)]
    bench.progress("r", choice=0, data=b"end", reason=FinishReason.LENGTH, flags=STREAM | LAST)
    assert bench.rows("r")[-1] == (0, STREAM | LAST, b"end")
    bench.assert_empty()


def test_clients_do_not_see_the_routers_own_flags() -> None:
    bench = Bench()
    bench.running("r")
    bench.progress("r", 5, data=b"x", flags=STREAM | ReadyFlags.STOPPED | LAST, reason=FinishReason.STOP)
    assert bench.rows("r")[-1] == (0, STREAM | LAST, b"x")


def test_rows_of_many_requests_travel_in_one_message() -> None:
    bench = Bench()
    for name in "abc":
        bench.running(name)
    bench.client_gone("b")
    bench.forget_sent()
    message = Progress(
        ("a", "b", "c"), (1, 1, 1), (0, 0, 0), (1, 1, 1), (0, 0, 0), (0, 0, 0), (1, 1, 1), (2, 3, 1),
        frames=(ids(1, 2, 3), b"aabbbc"),
    )  # fmt: skip
    bench.core.progress(message, bench.now)
    bench._take()
    (ready,) = bench.sent_to(API, ReadyBytes)
    assert ready.request_ids == ("a", "c")
    assert bytes(ready.frames[0]) == b"aac"


def test_bytes_that_all_go_on_are_passed_on_without_a_copy() -> None:
    bench = Bench()
    bench.running("a")
    bench.forget_sent()
    data = b"ready"
    bench.core.progress(Progress(("a",), (1,), (0,), (1,), (0,), (0,), (1,), (5,), frames=(ids(1), data)), bench.now)
    bench._take()
    assert bench.sent_to(API, ReadyBytes)[0].frames[0] is data


def test_a_row_without_bytes_is_not_sent() -> None:
    bench = Bench()
    bench.running("r")
    bench.forget_sent()
    bench.progress("r", 7)
    assert bench.sent == []


def test_work_is_spread_by_load() -> None:
    bench = Bench()
    bench.live("engine.1.1", "detokenizer.1.1")
    for name in "abcd":
        bench.submit(name)
    assert sorted(bench.last(Prepare, name).engine for name in "abcd") == [ENGINE, ENGINE, "engine.1.1", "engine.1.1"]
    assert {bench.last(Prepare, name).detokenizer for name in "abcd"} == {DETOKENIZER, "detokenizer.1.1"}


def test_a_worker_gets_no_more_than_its_capacity() -> None:
    bench = Bench(capacity=2)
    for number in range(10):
        bench.submit(str(number))
    assert len(bench.sent_to(TOKENIZER_0, Prepare)) == len(bench.sent_to(TOKENIZER_1, Prepare)) == 2
    assert bench.gauges()["num_requests_queued"] == 6
    bench.reject("0")
    assert bench.count(Prepare, "4") == 1


def test_a_second_hello_frees_no_place_that_is_taken() -> None:
    bench = Bench(capacity=1)
    for number in range(3):
        bench.submit(str(number))
    for worker in EVERYONE[2:]:
        bench.hello(worker)
    assert bench.count(Prepare, "2") == 0


def test_words_about_the_unknown_are_answered_with_an_abort() -> None:
    bench = Bench()
    bench.progress("nobody", 1, data=b"x", attempt=3)
    bench.undelivered("nobody", 4)
    bench.core.accepted(TOKENIZER_0, Accepted("nobody", 5, True, 1, 3, (b"", b"", b"")), bench.now)
    bench._take()
    for worker in (ENGINE, DETOKENIZER):
        assert bench.sent_to(worker, Abort) == [Abort("nobody", 3), Abort("nobody", 4), Abort("nobody", 5)]
    assert bench.sent_to(API, ReadyBytes) == []


def test_metrics_count_each_request_once() -> None:
    bench = Bench(max_unfinished_requests=3)
    bench.running("finished", 1)
    bench.submit("rejected")
    bench.running("gone", 1)
    bench.submit("refused")
    bench.reject("rejected")
    bench.finish("finished")
    bench.client_gone("gone")
    bench.client_gone("gone")
    bench.finish("gone", reason=FinishReason.ABORT)
    outcomes = {
        metric.labels: metric.values[0] for metric in bench.metrics.snapshot() if metric.name == "requests_total"
    }
    assert outcomes == {f'outcome="{name}"': 1.0 for name in ("finished", "rejected", "client_closed", "overloaded")}


def test_no_generate_comes_from_the_router_unless_somebody_died() -> None:
    bench = Bench()
    bench.running("r", 1)
    bench.tick(5)
    bench.finish("r")
    assert bench.sent_to(ENGINE, Generate) == []


@pytest.mark.parametrize("reason", [FinishReason.RUNNING, FinishReason.GUIDE_FAILED])
def test_a_response_that_ends_before_all_its_choices_have_stops_them(reason: FinishReason) -> None:
    """One choice failed, or the answer became too large: the others ran on for nobody, to their limit."""
    bench = Bench()
    bench.running("r", 1, stream=False, choices=2)
    bench.progress("r", data=b"error", status=400, reason=reason, flags=LAST)
    assert bench.end_of("r") == (400, b"error")
    assert [abort.choice for abort in bench.sent_to(ENGINE, Abort)] == [ALL_CHOICES]
    bench.assert_empty()


def test_a_response_whose_choices_have_all_ended_stops_nothing() -> None:
    bench = Bench()
    bench.running("r", 1, choices=2)
    bench.progress("r", 5, reason=FinishReason.LENGTH)
    bench.progress("r", 6, choice=1, reason=FinishReason.STOP, flags=STREAM | LAST)
    assert bench.sent_to(ENGINE, Abort) == []


@pytest.mark.parametrize("stream", [True, False])
def test_the_times_of_tokens_are_those_of_streams_and_plain_answers_alike(stream: bool) -> None:
    """A plain answer's whole time counted as that of its first token."""
    bench = Bench()
    bench.submit("r")
    bench.accept("r", stream=stream)
    for token in (7, 8, 9):
        bench.now += 2.0
        bench.progress("r", token, data=b"x" if stream else b"", flags=0)
    bench.now += 1.0
    bench.finish("r")
    sums = {metric.name: metric.values[-1] for metric in bench.metrics.snapshot()}
    assert sums["time_to_first_token_seconds"] == 2.0
    assert sums["time_per_output_token_seconds"] == 2.5
    assert sums["e2e_request_latency_seconds"] == 7.0
