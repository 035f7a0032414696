"""The tokens of one choice on their way to the client, where it asked for logprobs or ids. Detokenizer worker; pure.

A token goes out with the event that shows the last character of its text, a token without text with those after it;
the end takes all that is left. So which token is in which event follows from the ids alone, and a request that is
taken over neither repeats nor loses one. Every token that was consumed goes out, also those of the stop string that
cut the text: ids, logprobs and the usage count the same. The bytes are those of the text that is shown, and no more.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from tokservice.detokenizer.logprob_rows import LogprobRows, Row
from tokservice.detokenizer.token_names import TokenNames
from tokservice.protocol.token_entry import TokenEntry


class _Told(NamedTuple):
    """A token that has been consumed."""

    token_id: int
    data: bytes  # what it adds to the text
    offset: int  # characters before it
    end: int  # so many characters have to be shown for all of its text
    row: Row | None  # its logprobs


class TokenLog:
    """Tokens that have been consumed and not yet told."""

    def __init__(self, names: TokenNames, *, num_logprobs: int, at_once: bool) -> None:
        """``num_logprobs``: of the most likely tokens, -1 none at all; ``at_once``: ids alone count, not text."""
        self._names = names
        self._num_top = num_logprobs
        self._at_once = at_once
        self._told: deque[_Told] = deque()
        self._is_over = False  # no more come: all go out
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
        end = self.num_decoded + max(1, num_completed + is_unfinished)
        self._told.append(_Told(token_id, data, self.num_decoded, end, row))

    def hide_last(self) -> None:
        """The last token adds no text after all: it ended the choice."""
        self._told[-1] = self._told[-1]._replace(data=b"")

    def end(self) -> None:
        """No more tokens come: all that are left can go out, with the part of their text that is shown."""
        self._is_over = True

    def is_due(self, place: int) -> bool:
        """Whether the token at this place, from 0, goes out now, and so all before it."""
        told = self._told
        return len(told) > place and (self._is_over or self._at_once or told[place].end <= self.num_shown)

    def take(self, limit: int) -> list[TokenEntry]:
        """The tokens that go out now, up to so many of them."""
        taken: list[TokenEntry] = []
        while len(taken) < limit and self.is_due(0):
            taken.append(self._entry(self._told.popleft()))
        return taken

    def _entry(self, token: _Told) -> TokenEntry:
        data, offset = token.data, token.offset
        if self._is_over:
            data = _without_end(data, max(0, token.end - self.num_shown))
            offset = min(offset, self.num_shown)
        return self._names.entry(token.token_id, data, offset, token.row, self._num_top)


def _without_end(data: bytes, num_chars: int) -> bytes:
    """The bytes before the last characters; those that end one begun before count as it."""
    if num_chars == 0:
        return data
    starts = [place for place, byte in enumerate(data) if place == 0 or byte & 0xC0 != 0x80]
    return data[: starts[-num_chars]] if num_chars <= len(starts) else b""
