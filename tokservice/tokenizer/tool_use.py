"""The tools of a chat request: what the template shows, what the output must follow, how it is read.

Tokenizer worker; pure. A free answer (tool_choice "auto") is in the model's own format; where a call is demanded, the
output is guided to be JSON alone: the arguments of the one named function, or a list of calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from tokservice.protocol.requests import ChatBody
from tokservice.protocol.tools import Function, NamedTool, Tool, ToolChoice, ToolDemand, ToolName, check_kind
from tokservice.tokenizer.custom_tools import function_of, grammar_guide
from tokservice.tokenizer.guides import Guide, checked
from tokservice.tokenizer.time_limit import TimeUp, time_limit
from tokservice.wire.errors import RequestError

FORMATS = ("hermes", "llama3_json", "mistral")  # of a model's own; see detokenizer.tool_parsers
MAX_TOOLS = 128
MAX_CHECK_S = 2.0  # of CPU time: that of one schema has a bound, and many may be checked one by one
_NAME = re.compile(r"[a-zA-Z0-9_.\-]{1,128}")
_ANY_OBJECT = {"type": "object"}
COMPACT: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as models do


class ToolUse(NamedTuple):
    """How a request uses tools."""

    shown: list[dict[str, Any]] | None = None  # for the template
    format: str = ""  # how calls are written; "" where there are none
    names: tuple[str, ...] = ()
    custom: tuple[str, ...] = ()  # those whose input is a text
    parallel: bool = True
    guide: Guide | None = None


def format_of(template_source: str) -> str:
    """The format of tool calls of which a chat template speaks; that of Hermes and Qwen where it says nothing."""
    if "[TOOL_CALLS]" in template_source:
        return "mistral"
    if "<tool_call>" not in template_source and (
        "<|python_tag|>" in template_source or '"parameters"' in template_source
    ):
        return "llama3_json"
    return "hermes"


def tool_use(body: ChatBody, own_format: str) -> ToolUse:
    """What a body asks for. Raises RequestError (400)."""
    check_tools(body.tools or [])
    tools, choice = _allowed(body.tools or [], body.tool_choice)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise _invalid("'tool_choice' demands a call, but there are no 'tools'.", "tool_choice")
        return ToolUse()
    if choice == "none":
        return ToolUse()
    use = ToolUse(
        plain_tools(tools),
        own_format,
        names=tuple(function_of(tool).name for tool in tools),
        custom=tuple(tool.custom.name for tool in tools if tool.custom),
        parallel=body.parallel_tool_calls is not False,
    )
    if isinstance(choice, ToolDemand):
        return _named(use, _find(_by_name(tools), _name(choice)))
    if choice == "required":
        limit = {} if use.parallel else {"maxItems": 1}
        return use._replace(format="json_list", guide=_guide(list(map(function_of, tools)), _list_schema, **limit))
    return use


def check_tools(tools: list[Tool]) -> None:
    """Raise RequestError (400) for tools that cannot be told apart, or written."""
    if len(tools) > MAX_TOOLS:
        raise _invalid(f"'tools' may hold at most {MAX_TOOLS} tools.", "tools")
    for tool in tools:
        check_kind(tool, "tools")
    names = [function_of(tool).name for tool in tools]
    for name in names:
        if not _NAME.fullmatch(name):
            message = "A tool's name has 1 to 128 letters, digits, underscores, dots and dashes, unlike "
            raise _invalid(message + repr(name[:128]), "tools")
    if len(set(names)) < len(names):
        raise _invalid("Two of the 'tools' have the same name.", "tools")


def plain_tools(tools: list[Tool]) -> list[dict[str, Any]]:
    """Tools as templates expect them."""
    return [{"type": "function", "function": _plain(function_of(tool))} for tool in tools]


def _allowed(tools: list[Tool], choice: ToolChoice | None) -> tuple[list[Tool], ToolChoice | None]:
    """Without the tools that ``tool_choice`` keeps from the model."""
    if not isinstance(choice, ToolDemand):
        return tools, choice
    check_kind(choice, "tool_choice")
    if choice.allowed_tools is None:
        return tools, choice
    known = _by_name(tools)
    allowed = {name: _find(known, name) for name in map(_name, choice.allowed_tools.tools)}
    return [tool for name, tool in known.items() if name in allowed], choice.allowed_tools.mode


def _by_name(tools: list[Tool]) -> dict[tuple[str, str], Tool]:
    """By type and name."""
    return {(tool.type, function_of(tool).name): tool for tool in tools}


def _name(named: NamedTool) -> tuple[str, str]:
    check_kind(named, "tool_choice")
    asked: ToolName = getattr(named, named.type)
    return named.type, asked.name


def _find(known: dict[tuple[str, str], Tool], name: tuple[str, str]) -> Tool:
    if name not in known:
        raise _invalid(f"'tool_choice' names '{name[1][:128]}', which is not in 'tools'.", "tool_choice")
    return known[name]


def _named(use: ToolUse, tool: Tool) -> ToolUse:
    """A call of this tool is demanded."""
    function = function_of(tool)
    use = use._replace(names=(function.name,))
    if tool.custom and (guide := grammar_guide(tool.custom)):
        return use._replace(format="input", guide=checked(guide))
    return use._replace(format="named", guide=_guide([function], _schema))


def _plain(function: Function) -> dict[str, Any]:
    parameters = function.parameters or {}
    if "properties" not in parameters:  # some templates go through them
        parameters = {"type": "object", "properties": {}} | parameters
    plain: dict[str, Any] = {"name": function.name, "description": function.description, "parameters": parameters}
    return {key: value for key, value in plain.items() if value is not None}


def _guide(functions: list[Function], schema_of: Callable[[list[Function]], dict[str, Any]], **more: Any) -> Guide:
    """What calls of these functions must follow.

    A schema that no grammar can say whole, or not at all, binds as far as it can: the other functions can be called all
    the same, and all of them where their schemas are too large together. One that is ``strict`` binds, or is refused.
    Raises RequestError (400).
    """
    try:
        with time_limit(MAX_CHECK_S):
            return _bound(functions, schema_of, **more)
    except TimeUp as error:
        raise _invalid(f"To check the schemas of 'tools' takes more than {MAX_CHECK_S:g} s.", "tools") from error


def _bound(functions: list[Function], schema_of: Callable[[list[Function]], dict[str, Any]], **more: Any) -> Guide:
    for function in functions:
        if function.strict:
            _checked(_schema([function]), lenient=False)
    try:
        return _checked(schema_of(functions) | more, lenient=True)
    except RequestError:
        bound = [function if function.strict or _binds(function) else _free(function) for function in functions]
        if bound == functions:  # each could, but not all together
            bound = [function if function.strict else _free(function) for function in functions]
        if bound == functions:
            raise
    return _bound(bound, schema_of, **more)


def _checked(schema: dict[str, Any], *, lenient: bool) -> Guide:
    """``lenient``: keywords that no grammar can say do not count."""
    style = {"x-guidance": {**COMPACT, "lenient": lenient}}
    return checked(Guide("json_schema", json.dumps(style | schema, ensure_ascii=False), "tools"))


def _binds(function: Function) -> bool:
    """Whether its schema can be a guide, or binds nothing already."""
    try:
        return function.parameters == _ANY_OBJECT or bool(_checked(_schema([function]), lenient=True))
    except RequestError:
        return False


def _free(function: Function) -> Function:
    return replace(function, parameters=_ANY_OBJECT)


def _schema(functions: list[Function]) -> dict[str, Any]:
    """The arguments of one function."""
    return _ANY_OBJECT | (functions[0].parameters or {})


def _list_schema(functions: list[Function]) -> dict[str, Any]:
    """A list of calls."""
    calls = []
    for place, function in enumerate(functions):
        parameters = _moved(_schema([function]), f"#/items/anyOf/{place}/properties/arguments")
        parameters.pop("$id", None)  # by which its references would start elsewhere
        properties = {"name": {"const": function.name}, "arguments": parameters}
        required = ["name", "arguments"]
        calls.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}}


def _moved(part: Any, root: str) -> Any:
    """A part of a schema whose references start at ``root``, where the schema is now."""
    if isinstance(part, list):
        return [_moved(item, root) for item in part]
    if not isinstance(part, dict):
        return part
    moved = {key: _moved(value, root) for key, value in part.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved


def _invalid(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_value")
