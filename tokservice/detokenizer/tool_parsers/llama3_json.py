"""Tool calls of Llama 3: the whole answer is ``{"name": ..., "parameters": {...}}``, or several after semicolons.

Detokenizer worker; pure. An answer that is some other JSON is content: the name must be that of a tool.
"""

from __future__ import annotations

from tokservice.detokenizer.tool_parsers.parser import ToolParser


class Llama3JsonParser(ToolParser):
    """Objects from the very beginning of an answer, or after the mark."""

    mark = "<|python_tag|>"
    separators = ";,"

    def __init__(self, names: tuple[str, ...], *, parallel: bool) -> None:
        super().__init__(names, parallel=parallel)
        self._state = self._read_beginning

    def _read_beginning(self) -> bool:
        rest = self._text.lstrip()
        if not rest:
            self._say(self._text)
            self._text = ""
            return False
        self._state = self._read_start if rest[0] in "{[" else self._read_text
        return True

    def _begin_call(self, name: str) -> bool:
        return name in self._names and super()._begin_call(name)
