from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokservice.detokenizer.stop import StopMatcher, StopStrings

# A small alphabet, so that stop strings overlap each other and the text.
texts = st.text("ab€", max_size=40)
stop_lists = st.lists(st.text("ab€", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def reference(text: str, stops: tuple[str, ...], *, include_stop: bool) -> tuple[str, bool]:
    """Look at every prefix of the text: the first one that ends with a stop string ends it."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end if include_stop else end - max(map(len, ending))], True
    return text, False


@given(texts, stop_lists, st.lists(st.integers(1, 7), max_size=40), st.booleans())
def test_matches_the_reference_for_any_pieces(
    text: str, stops: tuple[str, ...], sizes: list[int], include_stop: bool
) -> None:
    matcher = StopMatcher(StopStrings(stops))
    shown, place, stopped = "", 0, False
    for size in [*sizes, *[1] * len(text)]:
        piece = text[place : place + size]
        place += size
        delta, stopped = matcher.push(piece, include_stop=include_stop)
        shown += delta
        if stopped:
            break
        held = text[len(shown) : place]
        assert text.startswith(shown + held)
        assert held == longest_live_suffix(text[:place], stops)
    if not stopped:
        shown += matcher.flush()
    assert (shown, stopped) == reference(text, stops, include_stop=include_stop)


def longest_live_suffix(text: str, stops: tuple[str, ...]) -> str:
    """What must be held back: the longest suffix of the text that is a proper prefix of some stop string."""
    lengths = range(min(len(text), max(map(len, stops), default=1) - 1), 0, -1)
    return next((text[-n:] for n in lengths if any(s.startswith(text[-n:]) and len(s) > n for s in stops)), "")
