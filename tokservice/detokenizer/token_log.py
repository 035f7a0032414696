"""The tokens of one choice on their way to the client, where it asked for logprobs or ids. Detokenizer worker; pure.

A token goes out with the event that shows the last character of its text, a token without text with those after it;
the end takes all that is left. So which token is in which event follows from the ids alone, and a request that is
taken over neither repeats nor loses one. Every token that was consumed goes out, also those of the stop string that
cut the text: ids, logprobs and the usage count the same. The bytes are those of the text that is shown, and no more.
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
        self._ends: deque[int] = deque()  # of each: so many characters have to be shown for all of its text
        self._rows: LogprobRows | None = None
        self._next_row = 0
        self.num_decoded = 0  # characters of the text so far
        self.num_shown = 0  # of those the client has

    def begin(self, rows: LogprobRows | None) -> None:
        """The rows of the tokens that follow."""
        self._rows, self._next_row = rows, 0

    def add(self, token_id: int, data: bytes, num_completed: int, *, is_unfinished: bool) -> None:
        """A token, before its text is counted. ``data``: what it adds to the text; ``num_completed``: the characters
        that it completes; ``is_unfinished``: it ends within one.
        """
        row = None
        if self._num_top >= 0 and self._rows is not None:
            row = self._rows.row(self._next_row)
            self._next_row += 1
        self._entries.append(self._names.entry(token_id, data, self.num_decoded, row, self._num_top))
        self._ends.append(self.num_decoded + max(1, num_completed + is_unfinished))

    def hide_last(self) -> None:
        """The last token adds no text after all: it ended the choice."""
        self._entries[-1] = self._entries[-1]._replace(data=b"")

    def take(self) -> list[TokenEntry]:
        """The tokens that go out now."""
        taken = []
        while self._entries and (self._at_once or self._ends[0] <= self.num_shown):
            taken.append(self._entries.popleft())
            self._ends.popleft()
        return taken

    def rest(self) -> list[TokenEntry]:
        """All that is left at the end, with the part of its text that is shown."""
        rest = [self._shown(entry, end) for entry, end in zip(self._entries, self._ends, strict=True)]
        self._entries.clear()
        self._ends.clear()
        return rest

    def _shown(self, entry: TokenEntry, end: int) -> TokenEntry:
        data = _without_end(entry.data, max(0, end - self.num_shown))
        return entry._replace(data=data, offset=min(entry.offset, self.num_shown))


def _without_end(data: bytes, num_chars: int) -> bytes:
    """The bytes before the last characters; those that end one begun before count as it."""
    if num_chars == 0:
        return data
    starts = [place for place, byte in enumerate(data) if place == 0 or byte & 0xC0 != 0x80]
    return data[: starts[-num_chars]] if num_chars <= len(starts) else b""
