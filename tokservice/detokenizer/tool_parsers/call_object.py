"""Reads one tool call that is written as a JSON object, and passes its arguments on as they come.

Detokenizer worker; pure. The object has a "name", and "arguments" or "parameters", in any order; other keys are read
over, and so are further arguments. Arguments that are a string hold the JSON text themselves; null is none. What their
strings have to escape is escaped where the model has not done so.
"""

from __future__ import annotations

from enum import IntEnum

from tokservice.detokenizer.tool_parsers.json_scan import JsonScanner, strict
from tokservice.detokenizer.tool_parsers.json_string import string_value

ARGUMENT_KEYS = ("arguments", "parameters")
MAX_NAME_CHARS = 1024  # of a key or a name, as it is written


class _At(IntEnum):
    OBJECT = 0  # before "{"
    KEY = 1
    COLON = 2
    VALUE = 3
    COMMA = 4
    END = 5
    BROKEN = 6


class CallObject:
    """The state of reading one object."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments: list[str] = []  # pieces of them that are not yet passed on
        self._at = _At.OBJECT
        self._scanner = JsonScanner()
        self._value: list[str] = []  # what is kept of the key or value that is being read
        self._first = ""  # its first character
        self._key = ""
        self._is_argued = False  # the arguments were read

    @property
    def is_done(self) -> bool:
        """The object is closed."""
        return self._at == _At.END

    @property
    def is_broken(self) -> bool:
        """This is no such object, as the last character shows."""
        return self._at == _At.BROKEN

    @property
    def _is_arguments(self) -> bool:
        return self._key in ARGUMENT_KEYS and not self._is_argued

    def take(self, character: str) -> None:
        """Read one more character."""
        if self._at == _At.VALUE and self._take_value(character):
            return
        if self._at == _At.KEY and self._value:
            self._take_key(character)
        elif not character.isspace():
            self._take_mark(character)

    def _take_mark(self, character: str) -> None:
        match self._at, character:
            case _At.OBJECT, "{":
                self._at = _At.KEY
            case _At.KEY, '"':
                self._scanner = JsonScanner()
                self._take_key(character)
            case _At.COLON, ":":
                self._at, self._value, self._first, self._scanner = _At.VALUE, [], "", JsonScanner()
            case _At.COMMA, ",":
                self._at, self._value = _At.KEY, []
            case ((_At.COMMA | _At.KEY), "}"):
                self._at = _At.END if self.name is not None else _At.BROKEN
            case _:
                self._at = _At.BROKEN

    def _take_key(self, character: str) -> None:
        self._scanner.take(character)
        self._value.append(self._scanner.written)
        if len(self._value) > MAX_NAME_CHARS:
            self._at = _At.BROKEN
        elif self._scanner.done:
            self._key = string_value("".join(self._value)) or ""
            self._at = _At.COLON

    def _take_value(self, character: str) -> bool:
        """Whether the character is part of the value, or of the blanks before it."""
        belongs = self._scanner.take(character)
        if self._scanner.broken:
            self._at = _At.BROKEN
            return True
        if belongs:
            self._keep(self._scanner.written)
        if self._scanner.done and not self.is_broken:
            self._end_value()
        return belongs or not self._scanner.done

    def _keep(self, written: str) -> None:
        self._first = self._first or written
        if self._is_arguments:
            (self._value if self._first in '"n' else self.arguments).append(written)
        elif self._key == "name":
            self._value.append(written)
            if len(self._value) > MAX_NAME_CHARS:
                self._at = _At.BROKEN

    def _end_value(self) -> None:
        self._at = _At.COMMA
        value = "".join(self._value)
        if self._key == "name":
            self.name = string_value(value)
            if not self.name:
                self._at = _At.BROKEN
        elif self._is_arguments:
            self._is_argued = value != "null"
            text = string_value(value) if self._first == '"' else value
            if text and self._is_argued:
                self.arguments.append(strict(text))
