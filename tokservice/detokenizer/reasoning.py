"""Splits an answer into the model's thoughts, between ``<think>`` and ``</think>``, and the rest.

Detokenizer worker; pure. Blanks around the tags are layout: they are dropped at the beginning of the thoughts and of
what follows them.
"""

from __future__ import annotations

from tokservice.detokenizer.tool_parsers.marks import split_at_mark
from tokservice.protocol.context import CLOSING_TAG, OPENING_TAG


class ReasoningSplitter:
    """``reasoning``: of the context. Where the prompt holds no beginning of thoughts, only an opening tag at the very
    beginning opens them.
    """

    def __init__(self, reasoning: str) -> None:
        self._text = ""  # held back
        self._lead: list[str] = []  # blanks before it, as long as an opening tag may follow
        self._is_open = reasoning in ("open", "inside")
        self._is_over = False  # no thoughts, or no more
        self._strips = reasoning == "open"  # blanks at this place are layout

    def push(self, text: str) -> tuple[str, str]:
        """The thoughts and the other text that more text completes."""
        self._text += text
        if not self._is_over and not self._is_open:
            self._look_for_opening()
        thoughts = self._think() if self._is_open else ""
        return thoughts, self._rest() if self._is_over else ""

    def flush(self) -> tuple[str, str]:
        """The end of the text: what was held back."""
        held, self._text, self._lead = "".join([*self._lead, self._text]), "", []
        return (held, "") if self._is_open else ("", "" if self._strips else held)

    def _look_for_opening(self) -> None:
        beginning = self._text.lstrip()
        if not beginning:
            self._lead.append(self._text)
            self._text = ""
        elif beginning.startswith(OPENING_TAG):
            self._text, self._lead = beginning[len(OPENING_TAG) :], []
            self._is_open = self._strips = True
        elif not OPENING_TAG.startswith(beginning):
            self._text, self._lead = "".join([*self._lead, self._text]), []
            self._is_over = True

    def _think(self) -> str:
        if self._strips:
            self._text = self._text.lstrip()
            self._strips = not self._text
        thoughts, self._text, found = split_at_mark(self._text, CLOSING_TAG)
        if found:
            self._is_open, self._is_over, self._strips = False, True, True
        return thoughts

    def _rest(self) -> str:
        if self._strips:
            self._text = self._text.lstrip()
            self._strips = not self._text
        rest, self._text = self._text, ""
        return rest
