from __future__ import annotations

import pytest

from tokservice.detokenizer.choice import ChoiceText
from tokservice.detokenizer.stop import StopStrings
from tokservice.detokenizer.text_stream import TextStream
from tokservice.wire.messages import FinishReason

RUNNING, STOP, LENGTH = FinishReason.RUNNING, FinishReason.STOP, FinishReason.LENGTH
A, B, C, EOS, EURO_1, EURO_2 = range(6)
TABLE = [b"a", b"b", b"c", b"<eos>", b"\xe2\x82", b"\xac"]


def choice(*stops: str, include_stop: bool = False, min_tokens: int = 0) -> ChoiceText:
    stream = TextStream(TABLE, strip_leading_space=False)
    return ChoiceText(stream, StopStrings(stops) if stops else None, include_stop=include_stop, min_tokens=min_tokens)


def test_tokens_after_a_stop_string_are_not_consumed() -> None:
    text = choice("b")
    assert text.push([A, B, C, C], RUNNING) == "a"
    assert (text.num_tokens, text.finish_reason) == (2, STOP)


def test_the_last_tokens_text_is_delivered() -> None:
    """The tokens that arrive together with the finish reason were thrown away: dynamo#3531."""
    text = choice()
    assert text.push([A, B], LENGTH) == "ab"
    assert (text.num_tokens, text.finish_reason) == (2, LENGTH)


@pytest.mark.parametrize("stops", [(), ("xyz",)])
def test_the_stop_token_is_counted_and_not_shown(stops: tuple[str, ...]) -> None:
    text = choice(*stops)
    assert text.push([A, EOS], STOP) == "a"
    assert (text.num_tokens, text.finish_reason) == (2, STOP)


def test_the_stop_token_is_shown_where_it_is_included() -> None:
    assert choice(include_stop=True).push([A, EOS], STOP) == "a<eos>"


def test_an_unfinished_character_before_the_stop_token_is_flushed() -> None:
    assert choice("xyz").push([A, EURO_1, EOS], STOP) == "a\ufffd"


def test_held_text_is_shown_at_the_end() -> None:
    text = choice("abc")
    assert text.push([A, B], RUNNING) == ""
    assert text.push([EOS], STOP) == "ab"


def test_a_stop_token_that_completes_a_stop_string_ends_it() -> None:
    """Replay knows only that the choice stopped: both kinds of end must agree."""
    for finish in (STOP, LENGTH, RUNNING):
        text = choice("ab")
        assert text.push([C, A, B], finish) == "c"
        assert text.finish_reason == STOP


def test_a_stop_of_a_split_character_is_found_and_nothing_leaks() -> None:
    """transformers#46519"""
    text = choice("€")
    assert text.push([A, EURO_1], RUNNING) == "a"
    assert text.push([EURO_2], RUNNING) == ""
    assert text.finish_reason == STOP


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    text = choice("b", min_tokens=2)
    assert text.push([B, B, A, B], RUNNING) == "bba"
    assert (text.num_tokens, text.finish_reason) == (4, STOP)


def test_abort_shows_nothing_and_consumes_nothing() -> None:
    text = choice("abc")
    text.push([A], RUNNING)
    assert text.push([B, C], FinishReason.ABORT) == ""
    assert (text.num_tokens, text.finish_reason) == (1, FinishReason.ABORT)
