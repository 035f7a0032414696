"""The tools that a chat request offers to the model. Used by the tokenizer workers."""

from __future__ import annotations

import typing
from typing import Any

import msgspec

SEPARATOR = "__"  # between a namespace and a function's name in it, where the two are one name


class Function(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call. Its schema binds where a call is required; in a free answer (tool_choice
    "auto") the model follows it as well as it can, ``strict`` or not."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of ``tools``."""

    function: Function
    type: typing.Literal["function"] = "function"


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    """Names a function."""

    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """A ``tool_choice`` that demands one function."""

    function: FunctionName
    type: typing.Literal["function"] = "function"


ToolChoice = typing.Literal["none", "auto", "required"] | NamedTool
