"""Conversations for chat templates that do not show all of them. Tokenizer worker; pure.

Whatever a template would refuse, or leave out without a sign, is said in a way that it shows: what tools can do, calls
and results as texts, in the form of Hermes; system messages as a part of their neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from tokservice.tokenizer.system_messages import GAP, folded
from tokservice.tokenizer.template_probes import Messages, Shown

TOOLS_PROMPT = """\
You can call the functions that are described here, one in each line:
{tools}
To call one, answer with its name and its arguments as JSON, in this form and without any other text:
<tool_call>
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def as_texts(
    conversation: list[dict[str, Any]], tools: Messages | None, shows: Shown
) -> tuple[list[dict[str, Any]], Messages | None]:
    """A conversation and its tools as far as the template ``shows`` them; the rest has become text.

    Earlier calls and results count without tools too: clients leave those out, or ask for no call, in a last turn.
    """
    prompted = None if shows.tools else tools
    if prompted:
        conversation = _with_tools_prompt(conversation, prompted)
    if not shows.late_system:
        conversation = folded(conversation, keeps_first=shows.system)
    if shows.named_results:
        conversation = list(_with_names(conversation))
    if prompted or not shows.calls:
        conversation = list(map(_with_calls_as_text, conversation))
    if not shows.results:
        conversation = _with_results_as_text(conversation)
    if shows.results and not shows.late_user:
        conversation = _with_users_joined(conversation)
    if not shows.kept_system and conversation[-1]["role"] != "user":
        conversation = folded(conversation, keeps_first=False)
    return conversation, tools if shows.tools else None


def _with_tools_prompt(conversation: Sequence[dict[str, Any]], tools: Messages) -> list[dict[str, Any]]:
    """The tools explained in the system message."""
    text = TOOLS_PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if conversation[0]["role"] == "system":
        first = {**conversation[0], "content": f"{conversation[0]['content']}\n\n{text}"}
        return [first, *conversation[1:]]
    return [{"role": "system", "content": text}, *conversation]


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """In the form that the prompt asks for."""
    if "tool_calls" not in message:
        return message
    calls = [call["function"] for call in message["tool_calls"]]
    texts = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    content = "\n".join(filter(None, [message["content"], *texts]))
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}


def _with_names(conversation: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Results with the names of their tools, which clients of OpenAI's API leave to the ids of calls."""
    names: dict[str | None, str] = {}
    for message in conversation:
        names |= {call.get("id"): call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and "name" not in message:
            message = {**message, "name": names.get(message.get("tool_call_id"), "tool")}
        yield message


def _with_users_joined(conversation: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the user says behind results joins the last of them."""
    result: list[dict[str, Any]] = []
    for role, group in groupby(conversation, lambda message: message["role"]):
        turns = list(group)
        if role == "user" and result and result[-1]["role"] == "tool":
            texts = [result[-1]["content"], *(turn["content"] for turn in turns)]
            result[-1] = {**result[-1], "content": GAP.join(texts)}
        else:
            result += turns
    return result


def _with_results_as_text(conversation: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
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
