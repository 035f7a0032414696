"""A schema for the answer beside tools that may be called: one grammar for both. Tokenizer worker; pure.

The schema is for what the model says in the end, as at OpenAI; agents send it with every request, and a schema alone
would keep the model from its tools. A call may be written in one form of the model's own; its arguments are any object,
as in a free answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokservice.tokenizer.guides import ANSWER, Guide, checked
from tokservice.tokenizer.tool_use import COMPACT, ToolUse
from tokservice.wire.errors import RequestError


def answer_or_calls(answer: Guide, tools: ToolUse, added_id: Callable[[str], int | None]) -> Guide:
    """The guide for an answer in a response format, or calls of tools instead; one for all of the output as it is.

    ``added_id``: the id of an added token by its text; None: there is none. Raises RequestError (400).
    """
    if tools.guide:
        if answer.param != ANSWER:
            message = f"'{answer.param}' and a 'tool_choice' that demands a call exclude each other."
            raise RequestError(message, param=answer.param, code="invalid_value")
        return tools.guide  # nothing is said in this answer
    if answer.param != ANSWER or not tools.format:
        return answer

    def mark(text: str) -> str:
        token_id = added_id(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    called = _call(tools.names, "parameters" if tools.format == "llama3_json" else "arguments")
    style = COMPACT
    match tools.format:
        case "mistral":
            limit = {} if tools.parallel else {"maxItems": 1}
            called = {"type": "array", "minItems": 1, **limit, "items": called}
            calls, between = f"{mark('[TOOL_CALLS]')} called", ""
        case "llama3_json":  # begins as an answer does: with other blanks it would take the answer's way from it
            style = json.loads(answer.text).get("x-guidance", COMPACT)
            calls, between = "called", "/; ?/"
        case _:
            calls, between = rf"{mark('<tool_call>')} /\n?/ called /\n?/ {mark('</tool_call>')}", r"/\n*/"
    rules = {
        "start": "answer | calls" + (f" ({between} calls)*" if between and tools.parallel else ""),
        "calls": calls,
        "called": f"%json {json.dumps({'x-guidance': style, **called})}",
        "answer": f"%json {answer.text}",
    }
    return checked(Guide("grammar", "".join(f"{name}: {rule}\n" for name, rule in rules.items()), answer.param))


def _call(names: tuple[str, ...], arguments: str) -> dict[str, Any]:
    properties = {"name": {"enum": list(names)}, arguments: {"type": "object"}}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
