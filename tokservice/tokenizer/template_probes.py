"""What a chat template shows, found out by rendering short conversations. Tokenizer worker, at start-up; pure.

Templates leave out what they do not know, mostly without a sign, or refuse it; words in their source tell neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tokservice.wire.errors import RequestError

Messages = Sequence[Mapping[str, Any]]

SHORT_ID_CHARS = 9
_SHORT_ID, _LONG_ID = "call00000", "call_0123456789abcdef"
_PARAMETERS = {
    "type": "object",
    "properties": {"key": {"type": "string", "description": "a key"}},
    "required": ["key"],
}
_FUNCTION = {"name": "probed_tool", "description": "a tool", "parameters": _PARAMETERS}
_TOOLS: Messages = [{"type": "function", "function": _FUNCTION}]


class Shown(NamedTuple):
    """What a template shows, and in which form it has to be given."""

    tools: bool
    calls: bool
    results: bool
    named_results: bool  # only those that name their tool
    late_user: bool  # messages of the user behind results
    system: bool  # a message at the beginning
    kept_system: bool  # the same, in a conversation that ends with a result or an answer
    late_system: bool  # those behind others, in their place
    developer: bool  # the role
    silence: str | None  # the content of a message that calls tools and says nothing
    arguments_as_text: bool  # of calls: JSON, not a mapping
    short_ids: bool  # of calls: nine letters and digits alone, as Mistral's templates want them


class Template(Protocol):
    """Of a ChatTemplate what is needed here."""

    source: str
    shows: Shown

    def render(
        self, messages: Messages, *, now: float, add_generation_prompt: bool, tools: Messages | None = None
    ) -> str:
        """The prompt's text. Raises RequestError."""


class Probe:
    """Asks one template."""

    def __init__(self, template: Template, *, for_tools: bool) -> None:
        """``for_tools``: all requests have tools."""
        self._template = template
        self._tools = _TOOLS if for_tools else None

    def shown(self) -> Shown:
        """All of it."""
        form = self._form_of_calls()
        system = _turn("system")
        shows_calls = form is not None or "tool_calls" in self._template.source
        silence, arguments = form or ("", {})
        exchange, later = _exchange(silence, arguments, name="probe"), {"role": "user", "content": "a reply"}
        shows_exchange = form is not None and self._shows(exchange, 2)
        ends = (exchange, [_turn("user"), _turn("assistant")])
        return Shown(
            tools="probed_tool" in self._text([_turn("user")], _TOOLS),
            calls=shows_calls,
            results=shows_calls or self._shows([_turn("user"), _turn("assistant"), _turn("tool")], 2),
            named_results=shows_exchange and not self._shows(_exchange(silence, arguments), 2),
            late_user=not shows_exchange or self._shows([*exchange, later], 3),
            system=self._shows([system, _turn("user")], 0),
            kept_system=all(self._shows([system, *turns], 0) for turns in ends if self._shows(turns, -1)),
            late_system=self._shows_late_system(),
            # A template that shows any role has not heard of this one.
            developer="developer" in self._template.source and self._shows([_turn("developer"), _turn("user")], 0),
            silence=silence,
            arguments_as_text=isinstance(arguments, str),
            short_ids=shows_exchange and not self._shows(_exchange(silence, arguments, _LONG_ID, name="probe"), 2),
        )

    def shows_parts_alone(self) -> bool:
        """Whether the template goes through the parts of a content, and so leaves out one that is a text."""
        contents: tuple[Any, ...] = ("probed", [{"type": "text", "text": "probed"}])
        shown = ["probed" in self._text([{"role": "user", "content": content}]) for content in contents]
        return shown == [False, True]

    def _form_of_calls(self) -> tuple[str | None, dict[str, str] | str] | None:
        """How a message must be for its calls to be shown: the content of one that says nothing, and its arguments;
        None: they are not shown in any form.

        Some templates show calls only beside a content that is none, some put arguments between quotes as they are: of
        a mapping Python's own form, or an error, would come of it.
        """
        for content in ("", None):
            for arguments in ({"probed_key": "probed_value"}, '{"probed_key": "probed_value"}'):
                text = self._text([_turn("user"), _calling(content, arguments)])
                if "probed_key" in text and "probed_value" in text and "'probed_key'" not in text:
                    return content, arguments
        return None

    def _shows_late_system(self) -> bool:
        """Whether a system message can stand behind others: some templates refuse it, leave it out, or show it at the
        beginning, where each new one would keep a conversation out of the prefix cache.
        """
        first, user, assistant = ({"role": role, "content": "a turn"} for role in ("system", "user", "assistant"))
        late = {"role": "system", "content": "a late one"}
        for before, after in (([first, user], []), ([first, user, assistant], [user])):
            earlier, found, _ = self._text([*before, late, *after]).partition(late["content"])
            if not found or earlier.count(first["content"]) < len(before):
                return False
        return True

    def _shows(self, messages: Messages, place: int) -> bool:
        """Whether the content of one of them can be seen."""
        return messages[place]["content"] in self._text(messages)

    def _text(self, messages: Messages, tools: Messages | None = None) -> str:
        """As the template writes it; empty where it refuses."""
        return _rendered(self._template, messages, tools or self._tools, add_generation_prompt=False)


def texts(template: Template) -> list[str]:
    """Some conversations as the template writes them; empty where it refuses one."""
    system, user, again = ({"role": role, "content": f"a {role} b"} for role in ("system", "user", "user"))
    assistant = {"role": "assistant", "content": "an answer", "reasoning_content": "a thought"}
    arguments = '{"key": "value"}' if template.shows.arguments_as_text else {"key": "value"}
    calling = _calling(template.shows.silence, arguments)
    result = {"role": "tool", "content": "a result", "tool_call_id": _SHORT_ID, "name": "probe"}
    conversations: list[Messages] = [
        [user],
        [system, user, assistant, again],
        [user, calling, result],
        [system, user, assistant, again, calling, result, assistant],
    ]
    return [
        _rendered(template, conversation, tools, add_generation_prompt=add_generation_prompt)
        for conversation in conversations
        for tools in (None, _TOOLS)
        for add_generation_prompt in (False, True)
    ]


def _rendered(template: Template, messages: Messages, tools: Messages | None, *, add_generation_prompt: bool) -> str:
    try:
        return template.render(messages, now=0, add_generation_prompt=add_generation_prompt, tools=tools)
    except RequestError:
        return ""


def _turn(role: str) -> dict[str, Any]:
    return {"role": role, "content": f"a probed {role}"}


def _exchange(content: str | None, arguments: Any, call_id: str = _SHORT_ID, **more: str) -> list[dict[str, Any]]:
    """A call and its result."""
    result = {**_turn("tool"), "tool_call_id": call_id, **more}
    return [_turn("user"), _calling(content, arguments, call_id), result]


def _calling(content: str | None, arguments: Any, call_id: str = _SHORT_ID) -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": "probe", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}
