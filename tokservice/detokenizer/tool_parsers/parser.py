"""What all parsers of tool calls have in common: a state machine over text that comes piece by piece.

Detokenizer worker; pure. Text outside of calls is content, except for the blanks beside calls. What begins like a
call and turns out to be none is content too, so that nothing the model wrote is lost; of a call that breaks off after
its arguments had begun, those stand, and what follows is content.

The work for a character does not depend on how many came before: what is held back is kept in pieces, and what turns
out to be no call is read again only if it is short.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tokservice.detokenizer.tool_parsers.call_object import CallObject
from tokservice.detokenizer.tool_parsers.marks import split_at_mark
from tokservice.protocol.parts import Kind, Part

MAX_REREAD_CHARS = 256  # in what was no call, others are looked for up to this length


class MessageParser(Protocol):
    """A state machine over the characters of a text: the joined parts never depend on how the text was cut."""

    def push(self, text: str) -> list[Part]:
        """The parts that more text completes."""

    def flush(self) -> list[Part]:
        """The end of the text: what was held back."""


class ToolParser:
    """Reads calls that are JSON objects: after a mark, alone or several in a list."""

    mark = ""  # what precedes a call
    closing = ""  # what may follow it
    separators = ","  # between the calls of one mark

    def __init__(self, names: tuple[str, ...], *, parallel: bool) -> None:
        """``names``: of the tools; without ``parallel`` all calls after the first are left out."""
        self._names = frozenset(names)
        self._parallel = parallel
        self._state: Callable[[], bool] = self._read_text
        self._text = ""  # not yet read
        self._parts: list[Part] = []
        self._lead: list[str] = []  # blanks at the beginning or beside calls: content only if other text follows
        self._is_fresh = True  # no other text has come yet
        self._num_calls = 0
        self._opening: list[str] = []  # from the mark to the object, to be shown if this is no call
        self._in_list = False
        self._object = CallObject()
        self._has_begun = False  # the client knows of the call that is being read
        self._unsaid: list[str] = []  # of its text, since the last arguments passed on
        self._gap: list[str] = []  # blanks behind it

    def push(self, text: str) -> list[Part]:
        """See MessageParser."""
        self._text += text
        while self._text and self._state():
            pass
        return self._take_parts()

    def flush(self) -> list[Part]:
        """See MessageParser."""
        unread, self._text = self._text, ""
        if self._has_begun or self._state == self._after_object:
            unread = ""  # a call that was cut off, or what may have become its closing mark
        unsaid = [] if self._has_begun else self._unsaid
        self._say("".join([*self._opening, *unsaid, unread]))
        if self._lead and not self._num_calls:
            self._parts.append(Part(Kind.CONTENT, "".join(self._lead)))
        return self._take_parts()

    # --- states: each reads from the front of the text, and says whether to go on

    def _read_text(self) -> bool:
        before, self._text, found = split_at_mark(self._text, self.mark)
        self._say(before)
        if found:
            self._opening, self._state = [self.mark], self._read_start
        return found

    def _read_rest(self) -> bool:
        """All that follows is content."""
        self._say(self._text)
        self._text = ""
        return False

    def _read_start(self) -> bool:
        """After the mark: an object, or a list of them."""
        self._skip_blanks()
        if self._text.startswith("[") and not self._in_list:
            self._in_list = True
            self._opening.append("[")
            self._text = self._text[1:]
        elif self._text:
            self._begin_object()
        return bool(self._text)

    def _begin_object(self) -> None:
        self._object, self._has_begun, self._unsaid = CallObject(), False, []
        self._state = self._read_object

    def _read_object(self) -> bool:
        for place, character in enumerate(self._text):
            self._object.take(character)
            self._unsaid.append(character)
            if self._object.is_broken or not self._pass_on():
                self._text = self._text[place + 1 :]
                self._give_up()
                return True
            if self._object.is_done:
                self._text = self._text[place + 1 :]
                self._end_call()
                self._state = self._after_object
                return True
        self._text = ""
        return False

    def _after_object(self) -> bool:
        """A closing mark, another object, with a separator or without, or text."""
        rest = self._text.lstrip()
        if not rest:
            self._gap.append(self._text)
            self._text = ""
            return False
        if self.closing and rest[0] == "}" and len(rest) <= MAX_REREAD_CHARS:
            inner = rest[1:].lstrip()  # one too many, as models write: it counts only if no closing mark follows
            rest = inner if inner.startswith(self.closing) or self.closing.startswith(inner) else rest
        if self.closing and self.closing.startswith(rest) and rest != self.closing:
            return False  # it may still become the closing mark
        self._text, self._gap = "".join([*self._gap, self._text]), []
        if self._in_list and rest[0] == "]":
            self._text, self._in_list = rest[1:], False
            if self.closing:
                return True
        elif rest[0] in self.separators and (self._in_list or not self.closing):
            self._opening, self._text, self._state = [rest[0]], rest[1:], self._read_start
            return True
        elif rest[0] == "{" and not self._in_list:  # another one, as models write them one below the other
            self._opening, self._text, self._state = [self._text[: -len(rest)]], rest, self._read_start
            return True
        elif self.closing and rest.startswith(self.closing):
            self._text = rest.removeprefix(self.closing)
        self._in_list = False
        self._state = self._read_text if self.mark else self._read_rest
        return True

    # --- what is said

    def _pass_on(self) -> bool:
        """Tell the client of the call once there is something to tell; False if there is no such tool."""
        call = self._object
        if call.name is None or not (call.arguments or call.is_done):
            return True
        if not self._has_begun:
            if not self._begin_call(call.name):
                return False
            if call.is_done and not call.arguments:
                call.arguments = ["{}"]
        if call.arguments:
            self._argue("".join(call.arguments))
            call.arguments = []
        return True

    def _begin_call(self, name: str) -> bool:
        self._has_begun, self._opening, self._unsaid = True, [], []
        self._is_fresh = True
        self._add(Part(Kind.CALL, name, self._num_calls))
        return True

    def _argue(self, text: str) -> None:
        self._unsaid = []
        self._add(Part(Kind.ARGUMENTS, text, self._num_calls))

    def _end_call(self) -> None:
        self._num_calls += 1
        self._has_begun, self._unsaid, self._lead = False, [], []

    def _give_up(self) -> None:
        """No call after all: what was read is content, and may hold other marks."""
        self._say("".join(self._opening))
        if len(self._unsaid) > MAX_REREAD_CHARS:
            *unsaid, last = self._unsaid
            self._say("".join(unsaid))
            self._unsaid = [last]  # a mark may begin with it
        self._text = "".join([*self._unsaid, self._text])
        self._num_calls += self._has_begun
        self._state = self._read_text if self.mark else self._read_rest
        if self._has_begun and self.closing:  # only its last brace may be missing
            self._state = self._after_object
        self._has_begun, self._opening, self._unsaid, self._in_list = False, [], [], False

    def _say(self, text: str) -> None:
        if self._is_fresh and not text.strip():
            self._lead += [text] if text else []
            return
        if self._is_fresh:
            text = "".join([*self._lead, text])
            self._lead, self._is_fresh = [], False
        if text:
            self._parts.append(Part(Kind.CONTENT, text))

    def _add(self, part: Part) -> None:
        if part.call and not self._parallel:
            return
        if part.kind == Kind.ARGUMENTS and self._parts and self._parts[-1].kind == Kind.ARGUMENTS:
            part = part._replace(text=self._parts.pop().text + part.text)
        self._parts.append(part)

    def _skip_blanks(self) -> None:
        rest = self._text.lstrip()
        self._opening.append(self._text[: len(self._text) - len(rest)])
        self._text = rest

    def _take_parts(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts
