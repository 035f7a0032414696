"""System messages for chat templates that refuse them, or leave them out. Tokenizer worker; pure.

Many templates take one at the beginning and none behind it, where coding agents put one more in almost every turn; some
take none at all. Each joins its neighbour, so that a request still begins as the one before did, and the prefix cache
finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

SYSTEM_ROLES = ("system", "developer")
GAP = "\n\n"


def folded(conversation: Iterable[dict[str, Any]], *, keeps_first: bool) -> list[dict[str, Any]]:
    """The same with one system message, at the beginning, or without ``keeps_first`` with none.

    A later one joins the message of the user, or the tool's result, before it; the first one, and those behind an
    answer, join the one after it. What nothing follows is said by the user: such templates would leave it out.
    """
    result: list[dict[str, Any]] = []
    waiting = ""
    for message in _in_runs(conversation):
        last = result[-1] if result else None
        if message["role"] not in SYSTEM_ROLES:
            if waiting and message["role"] == "assistant":
                result.append({"role": "user", "content": waiting})
            elif waiting:
                message = {**message, "content": _joined(waiting, message["content"])}
            waiting = ""
            result.append(message)
        elif last is None and keeps_first:
            result.append(message)
        elif last is None or last["role"] == "assistant":
            waiting = message["content"]
        else:
            result[-1] = {**last, "content": _joined(last["content"], message["content"])}
    if len(result) == 1 and result[0]["role"] in SYSTEM_ROLES:
        result, waiting = [], result[0]["content"]
    return [*result, {"role": "user", "content": waiting}] if waiting or not result else result


def _in_runs(conversation: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """System messages in a row as one: joined one by one, each would be copied for each that follows."""
    for is_system, group in groupby(conversation, lambda message: message["role"] in SYSTEM_ROLES):
        first, *others = group
        if is_system and others:
            yield {**first, "content": _joined(first["content"], *(message["content"] for message in others))}
        else:
            yield from (first, *others)


def _joined(*texts: str) -> str:
    return GAP.join(filter(None, texts))
