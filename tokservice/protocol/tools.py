"""The tools that a chat request offers to the model. Used by the tokenizer workers."""

from __future__ import annotations

import typing
from typing import Any

import msgspec

from tokservice.wire.errors import RequestError

SEPARATOR = "__"  # between a namespace and a function's name in it, where the two are one name
KINDS = ("function", "custom", "allowed_tools")


class Function(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call. Its schema binds where a call is required; in a free answer (tool_choice
    "auto") the model follows it as well as it can, ``strict`` or not."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AnyText(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """The input of a custom tool is any text."""


class Grammar(msgspec.Struct, forbid_unknown_fields=True):
    """What texts there are."""

    definition: str
    syntax: typing.Literal["lark", "regex"]


class GrammarText(msgspec.Struct, tag_field="type", tag="grammar", forbid_unknown_fields=True):
    """The input of a custom tool follows a grammar."""

    grammar: Grammar


class Custom(msgspec.Struct, forbid_unknown_fields=True):
    """A tool whose input is a text: see ``tokenizer.custom_tools``."""

    name: str
    description: str | None = None
    format: AnyText | GrammarText | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of ``tools``; it has the part that its type names."""

    function: Function | None = None
    custom: Custom | None = None
    type: typing.Literal["function", "custom"] = "function"


class ToolName(msgspec.Struct, forbid_unknown_fields=True):
    """Names a tool."""

    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """One tool, by its name; it has the part that its type names."""

    function: ToolName | None = None
    custom: ToolName | None = None
    type: typing.Literal["function", "custom"] = "function"


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    """The model knows these tools alone; "required" demands a call of one."""

    mode: typing.Literal["auto", "required"]
    tools: list[NamedTool]


class ToolDemand(NamedTool):
    """A ``tool_choice`` that demands one tool, or allows some."""

    allowed_tools: AllowedTools | None = None
    type: typing.Literal["function", "custom", "allowed_tools"] = "function"  # type: ignore[assignment]


ToolChoice = typing.Literal["none", "auto", "required"] | ToolDemand


def check_kind(entry: Tool | NamedTool, param: str) -> None:
    """Raise RequestError (400) unless an entry has the part that its type names, and no other one."""
    if any((getattr(entry, name, None) is not None) != (name == entry.type) for name in KINDS):
        message = f"'{param}': what has the type '{entry.type}' needs '{entry.type}', and no other such part."
        raise RequestError(message, param=param, code="invalid_value")
