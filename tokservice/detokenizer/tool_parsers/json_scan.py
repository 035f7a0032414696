"""Finds the end of a JSON value in a text that comes piece by piece, without parsing it. Detokenizer worker; pure.

Models write line ends and backslashes of code into strings as they are, which clients cannot read: ``written`` says
them as JSON has them.
"""

from __future__ import annotations

import json

_ESCAPABLE = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_CODE_CHARS = len("u0123")  # of a character, behind a backslash
_OPENING, _CLOSING = frozenset("{["), frozenset("}]")
_SCALAR_ENDS = frozenset(",}] \t\r\n")
_SCALAR = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


class JsonScanner:
    """Reads one value from its first character on."""

    __slots__ = ("_code", "_depth", "_escaped", "_in_string", "_started", "broken", "done", "written")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._code = ""  # held back: the beginning of a character's code
        self._started = False
        self.done = False
        self.broken = False
        self.written = ""  # the last character that belonged to the value, with those held back before it

    def take(self, character: str) -> bool:
        """Read one more character; whether it belongs to the value. False also ends a number or a word."""
        self.written = character
        if self._in_string:
            self._take_in_string(character)
            return True
        if character in _SCALAR_ENDS and not self._depth:
            self.done = self._started
            self.broken = not self._started and not character.isspace()
            return False
        self._started = True
        if character == '"':
            self._in_string = True
        elif character in _OPENING:
            self._depth += 1
        elif character in _CLOSING:
            self._depth -= 1
            self.done = self._depth == 0
        elif not self._depth and character not in _SCALAR:
            self.broken = True
            return False
        return True

    def _take_in_string(self, character: str) -> None:
        held, self._code = self._code, ""
        if held and character in _HEX:
            self._hold(held + character)
            return
        if character < " ":
            self.written = json.dumps(character)[1:-1]
        if held:  # no code after all: its backslash stands for itself
            self.written = "\\" + held + self.written
        if self._escaped:
            self._escaped = False
            if character == "u":
                self._hold(character)
            elif character not in _ESCAPABLE:  # this one too
                self.written = "\\" + self.written
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            self.done = self._depth == 0

    def _hold(self, code: str) -> None:
        is_whole = len(code) == _CODE_CHARS
        self.written, self._code = (code, "") if is_whole else ("", code)


def strict(text: str) -> str:
    """A JSON value with all of its strings as JSON has them."""
    scanner = JsonScanner()
    written = []
    for character in text:
        scanner.take(character)
        written.append(scanner.written)
    return "".join(written)
