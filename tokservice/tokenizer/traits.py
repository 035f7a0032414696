"""What of a model has a say in how requests become chats. Tokenizer worker; pure."""

from __future__ import annotations

from typing import NamedTuple


class Traits(NamedTuple):
    """Of its chat template, and of how its answers are read."""

    variables: frozenset[str] = frozenset()  # that the template reads
    tells_thoughts: bool = False  # apart from the text of an answer
