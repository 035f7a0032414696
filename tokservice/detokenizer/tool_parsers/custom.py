"""Calls of custom tools: the text that is their input, out of the arguments of a function. Detokenizer worker; pure.

Models know functions alone, and write ``{"input": "..."}``. What they write otherwise is the input as it
stands: nothing is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from tokservice.detokenizer.tool_parsers.demanded import NamedParser
from tokservice.detokenizer.tool_parsers.json_string import StringReader
from tokservice.detokenizer.tool_parsers.parser import MessageParser
from tokservice.protocol.parts import Kind, Part

_OPENING = '{"input":"'
_GAPS = (0, 1, 8, 9)  # blanks may stand before these characters of it
_KEY = 1  # begins with this one


class InputReader:
    """Reads the arguments of one call, and gives the input."""

    def __init__(self) -> None:
        self._place = 0  # in the opening
        self._held: list[str] = []  # what may be the opening
        self._string: StringReader | None = None
        self._is_plain = False  # all that comes is the input

    def push(self, text: str) -> str:
        """More of the input."""
        if self._string is not None:
            return self._string.push(text)
        if self._is_plain:
            return text
        for index, character in enumerate(text):
            if character == _OPENING[self._place]:
                self._place += 1
            elif not (character.isspace() and self._place in _GAPS):
                return self._give_up(text[index:])
            self._held.append(character)
            if self._place == len(_OPENING):
                self._string = StringReader()
                return self._string.push(text[index + 1 :])
        return ""

    def _give_up(self, rest: str) -> str:
        if rest[0] == "}" and self._place == _KEY:  # there are no arguments
            self._string = StringReader()
            self._string.is_done = True
            return ""
        self._is_plain = True
        return "".join([*self._held, rest])


class CustomParser:
    """What another parser finds, with calls of custom tools as such."""

    def __init__(self, parser: MessageParser, names: Collection[str]) -> None:
        self._parser = parser
        self._names = names
        self._input: InputReader | None = None  # of the call that goes on

    def push(self, text: str) -> list[Part]:
        """See MessageParser."""
        return list(self._read(self._parser.push(text)))

    def flush(self) -> list[Part]:
        """See MessageParser."""
        return list(self._read(self._parser.flush()))

    def _read(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if part.kind == Kind.CALL:
                is_custom = part.text in self._names
                self._input = InputReader() if is_custom else None
                yield part._replace(kind=Kind.CUSTOM_CALL) if is_custom else part
            elif part.kind == Kind.ARGUMENTS and self._input is not None:
                if text := self._input.push(part.text):
                    yield Part(Kind.INPUT, text, part.call)
            else:
                yield part


class InputParser(NamedParser):
    """``tool_choice`` with the name of a custom tool whose grammar guides the output: it is the input."""

    begin, more = Kind.CUSTOM_CALL, Kind.INPUT
