from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.contexts import context
from tests.helpers.sse import chunks, events, text_of
from tokservice import __version__
from tokservice.detokenizer.logprob_rows import view
from tokservice.detokenizer.respond import Fed, Responder
from tokservice.detokenizer.vocabulary import Vocabulary
from tokservice.wire.errors import ANSWER_TOO_LARGE, ENGINE_FAILED, GUIDE_FAILED, WireError, sse_error
from tokservice.wire.messages import FinishReason, Route

RUNNING, STOP, LENGTH = FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH
A, B, C, EOS, EURO_1, EURO_2, LINES, SPACED = range(8)
WORDS = [b"a", b"b", b"c", b"<eos>", b"\xe2\x82", b"\xac", "\u2028\u2029\x85\r\n\x0b".encode(), b" in the"]
VOCABULARY = Vocabulary(WORDS, [*WORDS[:3], b"", *WORDS[4:]], strips_leading_space=True, special_ids={WORDS[EOS]: EOS})

MESSAGE: dict[str, Any] = {"role": "assistant", "refusal": None, "annotations": []}
FINGERPRINT = f"tokservice-{__version__}"


def responder(**fields: Any) -> Responder:
    return Responder(VOCABULARY, context(**fields))


def test_chat_stream() -> None:
    made = responder()
    first = made.feed(0, [A], RUNNING)
    assert first == Fed(0, first.data, 1)
    assert first.data == (
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"tiny","choices":'
        b'[{"index":0,"delta":{"role":"assistant","content":"a"},"logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert made.feed(0, [B], RUNNING).data == first.data.replace(b'"role":"assistant",', b"").replace(b'"a"', b'"b"')
    last = made.feed(0, [EOS], STOP)
    assert (last.num_consumed, last.finish_reason, last.status, last.last) == (1, STOP, 0, True)
    (closing,) = events(last.data)
    assert closing["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert (closing["system_fingerprint"], closing["service_tier"]) == (FINGERPRINT, "default")


def test_completion_stream() -> None:
    made = responder(route=Route.COMPLETIONS, response_id="cmpl-1")
    stream = made.feed(0, [A], RUNNING).data + made.feed(0, [B], LENGTH).data
    assert [event["object"] for event in events(stream)] == ["text_completion"] * 2
    assert [event["choices"][0] for event in events(stream)] == [
        {"index": 0, "text": "a", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "b", "logprobs": None, "finish_reason": "length"},
    ]


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("finish", [RUNNING, STOP])
def test_a_stop_string_may_be_a_special_token(finish: FinishReason, include_stop: bool) -> None:
    """Its text is hidden, and so answers went on to the limit: vllm#2123, koboldcpp#791, tinker-feedback#90."""
    made = responder(stop=("<eos>",), include_stop=include_stop, route=Route.MESSAGES, stream=False)
    assert made.feed(0, [A, B], RUNNING).finish_reason == RUNNING
    fed = made.feed(0, [EOS, C] if finish == RUNNING else [EOS], finish)
    assert (fed.num_consumed, fed.finish_reason) == (1, STOP)
    answer = json.loads(bytes(fed.data))
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "<eos>")
    assert answer["content"][0]["text"] == ("ab<eos>" if include_stop else "ab")


@pytest.mark.parametrize("num_logprobs", [-1, 0])
def test_a_special_token_is_hidden_where_its_stop_string_does_not_count_yet(num_logprobs: int) -> None:
    made = responder(stop=("<eos>", "x"), min_tokens=2, num_logprobs=num_logprobs)
    stream = made.feed(0, [A, EOS, B], RUNNING).data
    fed = made.feed(0, [EOS, C], RUNNING)
    assert (text_of(events(stream + fed.data)), fed.num_consumed, fed.finish_reason) == ("ab", 1, STOP)


def test_an_empty_chat_answer_still_names_its_role() -> None:
    (closing,) = events(responder().feed(0, [EOS], STOP).data)
    assert closing["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("route", [Route.COMPLETIONS, Route.CHAT_COMPLETIONS])
def test_plain_response(route: Route) -> None:
    made = responder(route=route, stream=False, n=2, num_prompt_tokens=(5, 7))
    for choice in (0, 3, 1):
        assert made.feed(choice, [A, B], LENGTH) == Fed(choice, b"", 2, LENGTH)
    last = made.feed(2, [C, EOS], STOP, num_cached_tokens=4)
    assert (last.status, last.last) == (200, True)
    body = json.loads(last.data)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length", "stop", "length"]
    if route == Route.COMPLETIONS:
        assert [choice["text"] for choice in body["choices"]] == ["ab", "ab", "c", "ab"]
    else:
        assert body["choices"][2]["message"] == {**MESSAGE, "content": "c"}
        assert (body["object"], body["service_tier"]) == ("chat.completion", "default")
    assert body["system_fingerprint"] == FINGERPRINT
    assert body["usage"] == {
        "prompt_tokens": 12,
        "completion_tokens": 8,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.parametrize("n", [1, 3])
def test_usage_comes_once_without_choices_before_the_end(n: int) -> None:
    """The usage chunk carried choices; elsewhere usage was null in all chunks: litellm#28735."""
    made = responder(include_usage=True, n=n)
    stream = b"".join(made.feed(choice, [A, B], LENGTH).data for choice in range(n))
    *earlier, last = events(stream)
    assert all(event["usage"] is None for event in earlier)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 5 + 2 * n


def test_usage_is_the_same_streamed_and_plain_for_any_bundling() -> None:
    """Usage counted engine messages instead of tokens: vllm#8625."""
    bundled = responder(include_usage=True).feed(0, [A, B, C], LENGTH).data
    plain = responder(stream=False).feed(0, [A, B, C], LENGTH).data
    assert events(bundled)[-1]["usage"] == json.loads(plain)["usage"]


def test_continuous_usage() -> None:
    made = responder(include_usage=True, continuous_usage=True)
    stream = made.feed(0, [A], RUNNING, num_cached_tokens=99).data + made.feed(0, [B, C], LENGTH).data
    assert [event["usage"]["completion_tokens"] for event in events(stream)] == [1, 3, 3]
    assert events(stream)[0]["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}


def test_line_ends_are_escaped() -> None:
    """Raw U+2028, U+2029 and U+0085 in a data line broke clients: typescript-sdk#1926."""
    stream = responder(model="m\u2028").feed(0, [LINES], LENGTH).data
    assert text_of(events(stream)) == "\u2028\u2029\x85\r\n\x0b"


def test_a_stop_string_ends_the_choice_and_later_tokens_are_ignored() -> None:
    made = responder(stop=("bc",), include_usage=True)
    assert made.feed(0, [A, B], RUNNING).num_consumed == 2
    fed = made.feed(0, [C, A, A], RUNNING)
    assert (fed.num_consumed, fed.finish_reason, fed.last) == (1, STOP, True)
    assert events(fed.data)[-1]["usage"]["completion_tokens"] == 3
    assert made.feed(0, [A], RUNNING) == made.feed(0, [], FinishReason.ABORT) == Fed(0)


def test_tokens_without_text_make_no_event() -> None:
    assert responder().feed(0, [EURO_1], RUNNING) == Fed(0, b"", 1)


def test_special_tokens_are_shown_on_demand() -> None:
    assert text_of(events(responder(skip_special_tokens=False).feed(0, [EOS, A], LENGTH).data)) == "<eos>a"
    assert text_of(events(responder().feed(0, [EOS, A], LENGTH).data)) == "a"


def test_the_leading_blank_is_dropped_only_where_no_text_precedes() -> None:
    """transformers#22710, tokenizers#2212"""
    made = responder(num_prompt_tokens=(1, 5), bare_prompts=(0,), stream=False)
    made.feed(0, [SPACED, SPACED], LENGTH)
    body = json.loads(made.feed(1, [SPACED], LENGTH).data)
    assert [choice["message"]["content"] for choice in body["choices"]] == ["in the in the", " in the"]


def test_an_engine_failure_is_told_to_the_client() -> None:
    """A failure after the first chunk just closed the connection: litellm#39748."""
    made = responder(n=2)
    made.feed(0, [A], RUNNING)
    fed = made.feed(0, [B], FinishReason.ERROR)
    assert fed == Fed(0, sse_error(ENGINE_FAILED), 0, FinishReason.ERROR, 0, True)
    assert events(fed.data)[0]["error"]["code"] == "engine_error"
    assert made.feed(1, [A], RUNNING) == Fed(1)
    plain = responder(stream=False).feed(0, [], FinishReason.ERROR)
    assert (plain.data, plain.status, plain.last) == (ENGINE_FAILED.body(), 500, True)


def test_a_guide_that_cannot_be_followed_is_an_error_of_the_request() -> None:
    made = responder()
    made.feed(0, [A], RUNNING)
    assert made.feed(0, [], FinishReason.GUIDE_FAILED).data == sse_error(GUIDE_FAILED)
    plain = responder(stream=False).feed(0, [], FinishReason.GUIDE_FAILED)
    assert (plain.data, plain.status, plain.last) == (GUIDE_FAILED.body(), 400, True)
    made = responder(route=Route.RESPONSES, response_id="resp_1", more_fields=b'{"store":false}')
    assert b'"error":{"code":"invalid_prompt"' in made.feed(0, [], FinishReason.GUIDE_FAILED).data


@pytest.mark.parametrize("tokens", [[], [A]])
def test_an_engine_failure_has_its_event_in_the_responses_api(tokens: list[int]) -> None:
    made = responder(route=Route.RESPONSES, response_id="resp_1", more_fields=b'{"store":false}')
    stream = made.feed(0, tokens, RUNNING).data + made.feed(0, [], FinishReason.ERROR).data
    told = [json.loads(event.partition("data: ")[2]) for event in stream.decode().split("\n\n")[:-1]]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    assert told[-1]["type"] == "response.failed"
    response = told[-1]["response"]
    assert (response["status"], response["store"], response["usage"]) == ("failed", False, None)
    assert response["error"] == {"code": "server_error", "message": ENGINE_FAILED.message}


@pytest.mark.parametrize("stream", [True, False])
def test_an_aborted_request_ends_without_bytes(stream: bool) -> None:
    made = responder(stream=stream, n=2)
    assert made.feed(0, [], FinishReason.ABORT) == Fed(0, b"", 0, FinishReason.ABORT)
    assert made.feed(1, [], FinishReason.ABORT) == Fed(1, b"", 0, FinishReason.ABORT, 0, True)


def test_a_request_taken_over_tells_what_the_client_has_not_seen() -> None:
    taken_over = Responder(VOCABULARY, context(n=2), [1, 2], [RUNNING, LENGTH], [[A, B], [A, B]])
    (owed,) = taken_over.begin()
    assert (owed.choice, owed.num_consumed, owed.last) == (0, 0, False)
    assert text_of(chunks(owed.data)) == "b"
    assert b"role" not in owed.data
    assert taken_over.feed(0, [C], LENGTH).last


def test_a_plain_request_whose_choices_had_all_ended_is_answered_at_once() -> None:
    taken_over = Responder(VOCABULARY, context(stream=False), [2], [STOP], [[A, EOS]])
    (owed,) = taken_over.begin()
    assert (owed.status, owed.last) == (200, True)
    assert json.loads(owed.data)["choices"][0]["message"]["content"] == "a"
    assert taken_over.begin() == []


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_taken_over_of_which_a_choice_had_failed_fails(stream: bool) -> None:
    """A journal that no router writes; the process looked for the choice's text and ended."""
    for finished, error in ((FinishReason.ERROR, ENGINE_FAILED), (FinishReason.GUIDE_FAILED, GUIDE_FAILED)):
        taken_over = Responder(VOCABULARY, context(stream=stream, n=2), [1, 0], [LENGTH, finished], [[A], []])
        owed = taken_over.begin()[-1]
        expected = (0, sse_error(error)) if stream else (error.status, error.body())
        assert (owed.status, owed.data, owed.last) == (*expected, True)
        assert taken_over.has_ended(0)
        assert taken_over.has_ended(1)


CHOICES = st.tuples(st.integers(0, 5), st.sampled_from(FinishReason), st.lists(st.integers(0, 9), max_size=5))


@settings(deadline=None)
@given(
    journal=st.lists(CHOICES, max_size=4),
    route=st.sampled_from([route for route in Route if route != Route.GENERATE]),
    stream=st.booleans(),
)
def test_any_journal_makes_a_response_or_is_malformed(
    journal: list[tuple[int, FinishReason, list[int]]], route: Route, stream: bool
) -> None:
    frame = context(route=route, stream=stream, n=max(1, len(journal)), num_logprobs=-1)
    columns = [list(column) for column in zip(*journal, strict=True)] or [[], [], []]
    try:
        owed = Responder(VOCABULARY, frame, *columns).begin()
    except WireError:
        return
    ended = [finished for _, finished, _ in journal if finished]
    if journal and len(ended) == len(journal):
        assert owed[-1].last


def test_a_new_request_owes_nothing() -> None:
    assert responder().begin() == []


def test_a_malformed_context_is_a_wire_error() -> None:
    for frame in (b"", b"\xff", context()[:-1], context() + b"x"):
        with pytest.raises(WireError):
            Responder(VOCABULARY, frame)


@pytest.mark.parametrize(
    "fields", [{"n": 0}, {"n": -1}, {"n": 2**17}, {"num_prompt_tokens": ()}, {"num_prompt_tokens": (1,) * 2**17}]
)
def test_a_context_of_impossible_choices_is_a_wire_error(fields: dict[str, Any]) -> None:
    """A request without any choice ended its worker."""
    with pytest.raises(WireError):
        responder(**fields)


def test_an_uneven_journal_is_a_wire_error() -> None:
    for journal in (([1], [0], []), ([], [0], [[A]]), ([1, 1], [0, 0], [[A], [A]])):
        with pytest.raises(WireError):
            Responder(VOCABULARY, context(), *journal)


def test_a_body_that_no_message_can_carry_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was lost on its way to the client, who waited for ever."""
    monkeypatch.setattr("tokservice.detokenizer.respond.MAX_ANSWER_BYTES", 100)
    fed = responder(stream=False).feed(0, [A], LENGTH)
    assert (fed.status, fed.data, fed.last) == (400, ANSWER_TOO_LARGE.body(), True)
    assert responder(stream=True).feed(0, [A], LENGTH).last


def test_a_plain_response_gathers_no_more_than_it_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = view(3, array("I", [A, B, C]), array("f", [-1, -2, -3]))
    entry = json.loads(responder(stream=False, num_logprobs=2).feed(0, [A], LENGTH, 0, rows).data)["choices"][0]
    size = len(json.dumps(entry["logprobs"]["content"], separators=(",", ":")))
    monkeypatch.setattr("tokservice.detokenizer.respond.MAX_ANSWER_BYTES", 4 * size)
    made = responder(stream=False, num_logprobs=2, n=2)
    assert [made.feed(choice, [A], RUNNING, 0, rows).last for choice in (0, 1, 0)] == [False] * 3
    fed = made.feed(1, [A], RUNNING, 0, rows)
    assert (fed.num_consumed, fed.status, fed.data, fed.last) == (1, 400, ANSWER_TOO_LARGE.body(), True)
    assert made.feed(0, [A], LENGTH, 0, rows) == Fed(0)
    stream = responder(stream=True, num_logprobs=2)
    assert not any(stream.feed(0, [A], RUNNING, 0, rows).last for _ in range(10))
