"""The text of an assistant's message as thoughts, content and tool calls. Detokenizer worker; pure."""

from __future__ import annotations

from collections.abc import Callable

from tokservice.detokenizer.reasoning import ReasoningSplitter
from tokservice.detokenizer.tool_parsers.custom import CustomParser, InputParser
from tokservice.detokenizer.tool_parsers.demanded import JsonListParser, NamedParser
from tokservice.detokenizer.tool_parsers.hermes import HermesParser
from tokservice.detokenizer.tool_parsers.llama3_json import Llama3JsonParser
from tokservice.detokenizer.tool_parsers.mistral import MistralParser
from tokservice.detokenizer.tool_parsers.parser import MessageParser
from tokservice.protocol.context import Context
from tokservice.protocol.parts import Kind, Part
from tokservice.wire.errors import WireError

_TOOL_PARSERS: dict[str, Callable[[Context], MessageParser]] = {
    "hermes": lambda context: HermesParser(context.tool_names, parallel=context.parallel_tool_calls),
    "llama3_json": lambda context: Llama3JsonParser(context.tool_names, parallel=context.parallel_tool_calls),
    "mistral": lambda context: MistralParser(context.tool_names, parallel=context.parallel_tool_calls),
    "json_list": lambda context: JsonListParser(context.tool_names, parallel=context.parallel_tool_calls),
    "named": lambda context: NamedParser(context.tool_names),
    "input": lambda context: InputParser(context.tool_names),
}


def message_parser(context: Context) -> MessageParser | None:
    """The parser of a request's answers; None: all is content. Raises WireError for a format that nobody knows."""
    tools: MessageParser | None = None
    if context.tool_format:
        if context.tool_format not in _TOOL_PARSERS or not context.tool_names:
            raise WireError(f"no parser for tool calls in format {context.tool_format[:50]!r}")
        tools = _TOOL_PARSERS[context.tool_format](context)
        if context.custom_tools:
            tools = CustomParser(tools, frozenset(context.custom_tools))
    return _WithReasoning(context, tools) if context.reasoning else tools


class _WithReasoning:
    """Thoughts first; what follows them goes to the parser of tool calls, where there is one."""

    def __init__(self, context: Context, tools: MessageParser | None) -> None:
        self._splitter = ReasoningSplitter(context.reasoning)
        self._tools = tools

    def push(self, text: str) -> list[Part]:
        return self._parts(*self._splitter.push(text))

    def flush(self) -> list[Part]:
        parts = self._parts(*self._splitter.flush())
        return parts + self._tools.flush() if self._tools is not None else parts

    def _parts(self, thoughts: str, rest: str) -> list[Part]:
        parts = [Part(Kind.REASONING, thoughts)] if thoughts else []
        if self._tools is not None:
            return parts + self._tools.push(rest)
        return parts + ([Part(Kind.CONTENT, rest)] if rest else [])
