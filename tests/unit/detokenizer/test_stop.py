from __future__ import annotations

import time

import pytest

from tokservice.detokenizer.stop import StopMatcher, StopStrings, compiled


def run(stops: tuple[str, ...], pieces: list[str], *, include_stop: bool = False) -> tuple[list[str], bool]:
    """Push pieces until a stop string ends; the deltas (with the flush where none did), and whether one did."""
    matcher = StopMatcher(StopStrings(stops))
    shown = []
    for piece in pieces:
        text, stopped = matcher.push(piece, include_stop=include_stop)
        shown.append(text)
        if stopped:
            return shown, True
    return [*shown, matcher.flush()], False


def test_nothing_of_a_stop_string_is_shown_before_it_is_complete() -> None:
    """The beginning of a stop string had already been sent when the rest came: vllm#3574."""
    assert run(("<|end|>",), ["text <", "|en", "d", "|> more"]) == (["text ", "", "", ""], True)


def test_a_stop_inside_a_token_cuts_at_its_first_character() -> None:
    """Stops were matched at token borders alone: vllm#3672."""
    assert run(("or",), ["a w", "orld"]) == (["a w", ""], True)
    assert run(("rl",), ["a ", "world again"]) == (["a ", "wo"], True)


def test_the_stop_is_the_end_of_the_text_where_it_is_included() -> None:
    assert run(("rl",), ["a ", "world"], include_stop=True) == (["a ", "worl"], True)
    assert run(("END",), ["xE", "N", "Dy"], include_stop=True) == (["x", "", "END"], True)


def test_a_failed_partial_match_is_released_once() -> None:
    """With two stop strings released text was sent twice: llama.cpp#10914."""
    assert run(("\n", "User:"), ["Us", "er", " name", "\n"]) == (["", "", "User name", ""], True)


def test_the_longest_live_prefix_is_held_after_a_failure() -> None:
    assert run(("aab",), ["aa", "a", "b"]) == (["", "a", ""], True)
    assert run(("abcabd",), ["abcab", "cab", "d"]) == (["", "abc", ""], True)


def test_only_a_possible_beginning_is_held() -> None:
    """A window as long as the longest stop string was held back from every delta: smg#2203."""
    stop = "x" + "y" * 39
    assert run((stop,), ["hello", " world", " x", "y", "z"]) == (["hello", " world", " ", "", "xyz", ""], False)


def test_what_was_held_is_shown_at_the_end() -> None:
    assert run(("END",), ["the EN"]) == (["the ", "EN"], False)


def test_the_stop_that_is_complete_first_ends_the_text() -> None:
    for pieces in (["abcd"], ["a", "b", "c", "d"], ["ab", "cd"]):
        assert "".join(run(("abcd", "bc"), pieces)[0]) == "a"
    assert run(("bc", "abc"), ["xabc"]) == (["x"], True)  # of two that end together the longer one


@pytest.mark.parametrize("stop", ["hello", ".", "😀", "日本"])
def test_stops_act_on_text_whatever_their_tokenization(stop: str) -> None:
    """A stop that encodes to one id was ignored; of split characters missed: LightLLM#326, transformers#46519."""
    assert run((stop,), ["say ", *stop, " more"])[0][0] == "say "
    assert "".join(run((stop,), ["say ", *stop, " more"])[0]) == "say "


def test_cost_is_linear_in_the_text() -> None:
    matcher = StopMatcher(StopStrings(("a" * 200 + "b", "a" * 100 + "c")))
    begin = time.process_time()
    for _ in range(2000):
        assert not matcher.push("a" * 50, include_stop=False)[1]
    assert time.process_time() - begin < 2


def test_automata_are_shared_by_requests_with_the_same_stops() -> None:
    assert compiled(("a", "b")) is compiled(("a", "b"))
