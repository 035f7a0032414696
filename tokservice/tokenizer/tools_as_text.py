"""Tools for chat templates that know none: what they can do, calls and results as texts, in the form of Hermes.

Tokenizer worker; pure. See ``fitted.py`` for when.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from tokservice.tokenizer.system_messages import GAP
from tokservice.tokenizer.template_probes import Messages

TOOLS_PROMPT = """\
You can call the functions that are described here, one in each line:
{tools}
To call one, answer with its name and its arguments as JSON, in this form and without any other text:
<tool_call>
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def with_tools_prompt(conversation: Sequence[dict[str, Any]], tools: Messages) -> list[dict[str, Any]]:
    """The tools explained in the system message."""
    text = TOOLS_PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if conversation[0]["role"] == "system":
        first = {**conversation[0], "content": f"{conversation[0]['content']}{GAP}{text}"}
        return [first, *conversation[1:]]
    return [{"role": "system", "content": text}, *conversation]


def with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """In the form that the prompt asks for."""
    if "tool_calls" not in message:
        return message
    calls = [call["function"] for call in message["tool_calls"]]
    texts = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    content = "\n".join(filter(None, [message["content"], *texts]))
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}


def with_results_as_text(conversation: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results in a row are one message of the user, as where models of this form were trained, and so is what the user
    says next: many such templates refuse two messages of the user in a row.
    """
    result: list[dict[str, Any]] = []
    for is_result, group in groupby(conversation, lambda message: message["role"] == "tool"):
        turns = list(group)
        if is_result:
            texts = [f"<tool_response>\n{turn['content']}\n</tool_response>" for turn in turns]
            turns = [{"role": "user", "content": "\n".join(texts)}]
        elif result and turns[0]["role"] == "user":
            turns[0] = {**turns[0], "content": f"{result.pop()['content']}\n{turns[0]['content']}"}
        result += turns
    return result
