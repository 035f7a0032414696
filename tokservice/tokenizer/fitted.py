"""Conversations for chat templates that do not show all of them. Tokenizer worker; pure.

Whatever a template would refuse, or leave out without a sign, is said in a way that it shows: tools, calls and results
as texts; system messages, and what the user says behind results, as a part of their neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from tokservice.tokenizer.system_messages import GAP, folded
from tokservice.tokenizer.template_probes import Messages, Shown
from tokservice.tokenizer.tools_as_text import with_calls_as_text, with_results_as_text, with_tools_prompt


def fitted(
    conversation: list[dict[str, Any]], tools: Messages | None, shows: Shown
) -> tuple[list[dict[str, Any]], Messages | None]:
    """A conversation and its tools as far as the template ``shows`` them; the rest has become text.

    Earlier calls and results count without tools too: clients leave those out, or ask for no call, in a last turn.
    """
    prompted = None if shows.tools else tools
    if prompted:
        conversation = with_tools_prompt(conversation, prompted)
    if not shows.late_system:
        conversation = folded(conversation, keeps_first=shows.system)
    if shows.named_results:
        conversation = list(_with_names(conversation))
    if prompted or not shows.calls:
        conversation = list(map(with_calls_as_text, conversation))
    if not shows.results:
        conversation = with_results_as_text(conversation)
    if shows.results and not shows.late_user:
        conversation = _with_users_joined(conversation)
    if not shows.kept_system and conversation[-1]["role"] != "user":
        conversation = folded(conversation, keeps_first=False)
    return conversation, tools if shows.tools else None


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
