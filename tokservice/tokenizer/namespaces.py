"""Functions in namespaces, as coding agents offer them in the Responses API. Tokenizer worker; pure.

Chat templates and models know functions alone: a function of a namespace gets a name that says both, in the prompt and
in earlier calls; the answer's calls are told apart again (``Context.namespaces``).
"""

from __future__ import annotations

from collections.abc import Iterable

from tokservice.protocol.reading import refuse_unsupported
from tokservice.protocol.responses_api_requests import TOOL_NEUTRAL, FunctionFields, FunctionTool, NamespaceTool
from tokservice.protocol.tools import SEPARATOR, Function, Tool


def whole_name(namespace: str | None, name: str) -> str:
    """A function's name for the model."""
    return name if namespace is None else f"{namespace}{SEPARATOR}{name}"


def functions(tools: Iterable[FunctionTool | NamespaceTool]) -> list[Tool]:
    """All functions. What is said of a namespace stands before what is said of its first one. Raises RequestError."""
    found = []
    for tool in tools:
        if isinstance(tool, FunctionTool):
            found.append(_tool(tool, tool.name, tool.description))
            continue
        about = tool.description
        for function in tool.tools:
            described = "\n\n".join(filter(None, (about, function.description)))
            found.append(_tool(function, whole_name(tool.name, function.name), described or None))
            about = None
    return found


def namespaces(tools: Iterable[FunctionTool | NamespaceTool]) -> dict[str, str]:
    """The namespace of each whole name that has one."""
    spaces = [tool for tool in tools if isinstance(tool, NamespaceTool)]
    return {whole_name(space.name, function.name): space.name for space in spaces for function in space.tools}


def _tool(tool: FunctionFields, name: str, description: str | None) -> Tool:
    refuse_unsupported(tool, TOOL_NEUTRAL, param="tools")
    return Tool(Function(name, description, tool.parameters, tool.strict))
