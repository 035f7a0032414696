"""Tool calls of Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, and the newer form in which each
mark is followed by a name and its arguments: ``[TOOL_CALLS]name[ARGS]{...}``.

Detokenizer worker; pure.
"""

from __future__ import annotations

import re

from tokservice.detokenizer.tool_parsers.json_scan import JsonScanner
from tokservice.detokenizer.tool_parsers.parser import ToolParser

_NAME = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\w*\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_NAME_BEGINS = re.compile(r"\s*[\w.\-]*\s*(?:\[[\w]*\]?\w*\s*){0,2}")
MAX_NAME_CHARS = 256


class MistralParser(ToolParser):
    """Both forms."""

    mark = "[TOOL_CALLS]"

    def __init__(self, names: tuple[str, ...], *, parallel: bool) -> None:
        super().__init__(names, parallel=parallel)
        self._scanner = JsonScanner()

    def _read_start(self) -> bool:
        self._skip_blanks()
        if not self._text or self._text[0] in "[{":
            return super()._read_start()
        self._state = self._read_name
        return True

    def _read_name(self) -> bool:
        match = _NAME.match(self._text)
        if match and match.end() <= MAX_NAME_CHARS:
            self._text = self._text[match.end() :]
            self._scanner = JsonScanner()
            self._begin_call(match[1])
            self._state = self._read_arguments
            return True
        if len(self._text) <= MAX_NAME_CHARS and _NAME_BEGINS.fullmatch(self._text):
            return False  # it may still become one
        self._give_up()
        return True

    def _read_arguments(self) -> bool:
        written = []
        for place, character in enumerate(self._text):
            self._scanner.take(character)
            written.append(self._scanner.written)
            if self._scanner.done:
                self._argue("".join(written))
                self._text = self._text[place + 1 :]
                self._end_call()
                self._state = self._after_object
                return True
        self._argue("".join(written))
        self._text = ""
        return False
