"""Finds marks in a text that comes piece by piece, holding back what may become one. Detokenizer worker; pure."""

from __future__ import annotations


def split_at_mark(text: str, mark: str) -> tuple[str, str, bool]:
    """What is before the first mark, what is after it (or may still become it), and whether it is there."""
    before, found, after = text.partition(mark)
    if found:
        return before, after, True
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return text[:-size], text[-size:], False
    return text, "", False
