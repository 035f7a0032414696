"""Stop strings: find the earliest one in a growing text. Detokenizer worker; pure.

The text ends at the first character that completes any stop string, as if the model wrote one character at a
time; where several end there, the longest counts. So the result never depends on how the text was cut into tokens.

An Aho-Corasick automaton (Aho and Corasick, "Efficient string matching", 1975) reads each character once. Its
state is the longest suffix of the text that begins a stop string, which is exactly what must be held back.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache


class StopStrings:
    """The automaton for some stop strings; immutable, shared by all choices of a request."""

    __slots__ = ("depth", "fail", "goto", "match_length")

    def __init__(self, stops: tuple[str, ...]) -> None:
        # By state; 0 is the root.
        self.goto: list[dict[str, int]] = [{}]
        self.fail = [0]  # the longest proper suffix that is a state too
        self.depth = [0]  # characters of the state
        self.match_length = [0]  # of the longest stop string that ends here
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self.goto[state].get(character)
            if following is None:
                following = len(self.goto)
                self.goto[state][character] = following
                self.goto.append({})
                self.fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match_length.append(0)
            state = following
        self.match_length[state] = len(stop)

    def _link(self) -> None:
        queue = deque(self.goto[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self.goto[state].items():
                self.fail[following] = self.next(self.fail[state], character)
                self.match_length[following] = self.match_length[following] or self.match_length[self.fail[following]]
                queue.append(following)

    def next(self, state: int, character: str) -> int:
        """The state after one more character; constant cost on average over a text."""
        while True:
            following = self.goto[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fail[state]


@lru_cache(maxsize=256)
def compiled(stops: tuple[str, ...]) -> StopStrings:
    """The automaton for some stop strings; clients repeat theirs."""
    return StopStrings(stops)


class StopMatcher:
    """The text of one choice on its way through the automaton."""

    __slots__ = ("_held", "_state", "_stops", "matched")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self.matched = ""  # the stop string that was completed
        self._held = ""  # the longest suffix of the text that is a proper prefix of a stop string

    def push(self, text: str, *, include_stop: bool) -> tuple[str, bool]:
        """The text that can be shown now, and whether a stop string was completed (then it is the last)."""
        stops, state = self._stops, self._state
        if state == 0 and stops.goto[0].keys().isdisjoint(text):
            return text, False
        text = self._held + text
        for end in range(len(self._held), len(text)):
            state = stops.next(state, text[end])
            if length := stops.match_length[state]:
                end += 1
                self.matched = text[end - length : end]
                return text[:end] if include_stop else text[: end - length], True
        self._state = state
        cut = len(text) - stops.depth[state]
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """The end of the text: what was held back is shown."""
        held, self._held, self._state = self._held, "", 0
        return held
