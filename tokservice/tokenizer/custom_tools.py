"""Tools whose input is a text, not JSON. Tokenizer worker; pure.

Models are trained on functions, and a custom tool is shown as one with a single argument. Where a call of a tool with a
grammar is demanded by its name, the output is that text alone, guided by the grammar; where any call is, it is JSON,
which a regex binds and a Lark grammar does not. In a free answer the model has read the grammar, no more.
"""

from __future__ import annotations

from typing import Any

from tokservice.protocol.tools import Custom, Function, Grammar, GrammarText, Tool
from tokservice.tokenizer.guides import Guide

INPUT = "input"  # the argument
_GUIDE_KINDS = {"lark": "grammar", "regex": "regex"}


def function_of(tool: Tool) -> Function:
    """A tool, which has the part that its type names, as the function that the model knows."""
    if tool.custom is not None:
        return _as_function(tool.custom)
    assert tool.function is not None
    return tool.function


def grammar_guide(custom: Custom) -> Guide | None:
    """What the input must follow, not yet checked; None: it is any text."""
    grammar = _grammar(custom)
    return Guide(_GUIDE_KINDS[grammar.syntax], grammar.definition, "tools") if grammar else None


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of an earlier call with this input."""
    return {INPUT: text}


def _as_function(custom: Custom) -> Function:
    schema: dict[str, Any] = {"type": "string"}
    grammar = _grammar(custom)
    if grammar and grammar.syntax == "regex":
        schema["pattern"] = f"^(?:{grammar.definition})$"
    elif grammar:
        schema["description"] = f"A text that follows this grammar:\n{grammar.definition}"
    parameters = {"type": "object", "properties": {INPUT: schema}, "required": [INPUT], "additionalProperties": False}
    return Function(custom.name, custom.description, parameters)


def _grammar(custom: Custom) -> Grammar | None:
    return custom.format.grammar if isinstance(custom.format, GrammarText) else None
