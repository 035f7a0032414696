"""The text of an assistant's message as thoughts, content and tool calls. Detokenizer worker; pure."""

from __future__ import annotations

from typing import Protocol

from tokservice.protocol.context import Context
from tokservice.protocol.parts import Part


class MessageParser(Protocol):
    """A state machine over the characters of a text: the joined parts never depend on how the text was cut."""

    def push(self, text: str) -> list[Part]:
        """The parts that more text completes."""

    def flush(self) -> list[Part]:
        """The end of the text: what was held back."""


def message_parser(context: Context) -> MessageParser | None:
    """The parser of a request's answers; None: all is content."""
    return None
