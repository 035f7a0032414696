"""The tokens of one choice on their way to the client, where it asked for logprobs or ids. Detokenizer worker; pure.

A token goes out with the event that shows the first character of its text, a token without text with those after it;
the end takes all that is left. So which token is in which event follows from the ids alone, and a request that is
taken over neither repeats nor loses one. Where a stop string cuts the text, the tokens that lie behind the cut are
told apart: they were generated (and count in the usage), but belong to no text.
"""

from __future__ import annotations

from collections import deque

from tokservice.detokenizer.logprob_rows import LogprobRows
from tokservice.detokenizer.token_names import TokenNames
from tokservice.protocol.parts import TokenEntry


class TokenLog:
    """Tokens that have been consumed and not yet told."""

    def __init__(self, names: TokenNames, *, num_logprobs: int, at_once: bool) -> None:
        """``num_logprobs``: of the most likely tokens, -1 none at all; ``at_once``: ids alone count, not text."""
        self._names = names
        self._num_top = num_logprobs
        self._at_once = at_once
        self._entries: deque[TokenEntry] = deque()
        self._rows: LogprobRows | None = None
        self._next_row = 0
        self.num_decoded = 0  # characters of the text so far
        self.num_shown = 0  # of those the client has

    def begin(self, rows: LogprobRows | None) -> None:
        """The rows of the tokens that follow."""
        self._rows, self._next_row = rows, 0

    def add(self, token_id: int, data: bytes) -> None:
        """A token, before its text is counted. ``data``: what it adds to the text."""
        row = None
        if self._num_top >= 0 and self._rows is not None:
            row = self._rows.row(self._next_row)
            self._next_row += 1
        self._entries.append(self._names.entry(token_id, data, self.num_decoded, row, self._num_top))

    def hide_last(self) -> None:
        """The last token adds no text after all: it ended the choice."""
        self._entries[-1] = self._entries[-1]._replace(data=b"")

    def take(self) -> list[TokenEntry]:
        """The tokens that go out now."""
        taken = []
        while self._entries and (self._at_once or self._entries[0].offset < self.num_shown):
            taken.append(self._entries.popleft())
        return taken

    def rest(self) -> list[TokenEntry]:
        """All that is left."""
        rest, self._entries = list(self._entries), deque()
        return rest
