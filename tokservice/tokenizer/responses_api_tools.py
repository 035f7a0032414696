"""Tools of the Responses API as those of chats. Tokenizer worker; pure.

Coding agents offer some in namespaces. Chat templates and models know functions alone: a tool of a namespace gets a
name that says both, in the prompt and in earlier calls; the answer's calls are told apart again
(``Context.namespaces``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokservice.protocol import responses_api_requests as requests
from tokservice.protocol.reading import refuse_unsupported
from tokservice.protocol.responses_api_requests import (
    CUSTOM_NEUTRAL,
    FUNCTION_NEUTRAL,
    CustomChoice,
    CustomTool,
    FunctionChoice,
    FunctionTool,
    NamespaceTool,
)
from tokservice.protocol.tools import (
    SEPARATOR,
    AllowedTools,
    AnyText,
    Custom,
    Function,
    Grammar,
    GrammarText,
    NamedTool,
    Tool,
    ToolChoice,
    ToolDemand,
    ToolName,
)

AnyTool = FunctionTool | CustomTool | NamespaceTool


def whole_name(namespace: str | None, name: str) -> str:
    """A tool's name for the model."""
    return name if namespace is None else f"{namespace}{SEPARATOR}{name}"


def plain_tools(tools: Iterable[AnyTool]) -> list[Tool]:
    """All tools. What is said of a namespace stands before what is said of its first one. Raises RequestError."""
    found = []
    for tool in tools:
        if not isinstance(tool, NamespaceTool):
            found.append(_tool(tool, tool.name, tool.description))
            continue
        about = tool.description
        for inner in tool.tools:
            described = "\n\n".join(filter(None, (about, inner.description)))
            found.append(_tool(inner, whole_name(tool.name, inner.name), described or None))
            about = None
    return found


def namespaces(tools: Iterable[AnyTool]) -> dict[str, str]:
    """The namespace of each whole name that has one."""
    spaces = [tool for tool in tools if isinstance(tool, NamespaceTool)]
    return {whole_name(space.name, tool.name): space.name for space in spaces for tool in space.tools}


def tool_choice(choice: requests.ToolChoice | None, tools: Sequence[AnyTool]) -> ToolChoice | None:
    """Which tools are asked for, and whether a call is."""
    match choice:
        case requests.AllowedTools():
            known = _whole_names(tools)
            allowed = AllowedTools(choice.mode, [_named(named, known) for named in choice.tools])
            return ToolDemand(allowed_tools=allowed, type="allowed_tools")
        case FunctionChoice() | CustomChoice():
            named = _named(choice, _whole_names(tools))
            return ToolDemand(named.function, named.custom, named.type)
    return choice


def _whole_names(tools: Iterable[AnyTool]) -> dict[str, str]:
    """By the name that a request may say: of a tool in a namespace its own, if no tool outside has it."""
    own = {name.removeprefix(f"{space}{SEPARATOR}"): name for name, space in namespaces(tools).items()}
    return own | {tool.name: tool.name for tool in tools if not isinstance(tool, NamespaceTool)}


def _named(choice: FunctionChoice | CustomChoice, known: dict[str, str]) -> NamedTool:
    name = ToolName(known.get(choice.name, choice.name))
    return NamedTool(function=name) if isinstance(choice, FunctionChoice) else NamedTool(custom=name, type="custom")


def _tool(tool: FunctionTool | CustomTool, name: str, description: str | None) -> Tool:
    if isinstance(tool, FunctionTool):
        refuse_unsupported(tool, FUNCTION_NEUTRAL, param="tools")
        return Tool(Function(name, description, tool.parameters, tool.strict))
    refuse_unsupported(tool, CUSTOM_NEUTRAL, param="tools")
    return Tool(custom=Custom(name, description, _text(tool)), type="custom")


def _text(tool: CustomTool) -> AnyText | GrammarText | None:
    if isinstance(tool.format, requests.GrammarText):
        return GrammarText(Grammar(tool.format.definition, tool.format.syntax))
    return tool.format
