"""Tool calls that the request demanded: the output is guided to be JSON, without any mark. Detokenizer worker; pure."""

from __future__ import annotations

from tokservice.detokenizer.tool_parsers.parser import ToolParser
from tokservice.protocol.parts import Kind, Part


class JsonListParser(ToolParser):
    """``tool_choice`` "required": a list of calls."""

    def __init__(self, names: tuple[str, ...], *, parallel: bool) -> None:
        super().__init__(names, parallel=parallel)
        self._state = self._read_start

    def flush(self) -> list[Part]:
        """See MessageParser. The beginning of a call that was cut off before it had a name is no content."""
        self._opening, self._unsaid = [], []
        return super().flush()


class NamedParser:
    """``tool_choice`` with a name: the output is the arguments of this function."""

    begin, more = Kind.CALL, Kind.ARGUMENTS

    def __init__(self, names: tuple[str, ...]) -> None:
        self._name = names[0]
        self._has_begun = False

    def push(self, text: str) -> list[Part]:
        """See MessageParser."""
        if not text:
            return []
        begin = [] if self._has_begun else [Part(self.begin, self._name)]
        self._has_begun = True
        return [*begin, Part(self.more, text)]

    def flush(self) -> list[Part]:
        """See MessageParser."""
        return []
