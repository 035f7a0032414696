"""System messages behind the first one, for chat templates that take none there. Tokenizer worker; pure.

Coding agents put some among the messages, one more in almost every turn. Each joins its neighbour, so that a request
still begins as the one before did, and the prefix cache finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from msgspec.structs import replace

from tokservice.protocol.requests import Message

SYSTEM_ROLES = ("system", "developer")
GAP = "\n\n"


def folded(messages: Iterable[Message]) -> list[Message]:
    """The same with one system message, at the beginning. Contents are texts.

    A later one joins the message of the user, or the tool's result, before it; behind an answer the one after it.
    """
    result: list[Message] = []
    waiting = ""  # behind an answer
    for message in _in_runs(messages):
        text, last = str(message.content or ""), result[-1] if result else None
        if message.role not in SYSTEM_ROLES:
            if waiting and message.role == "assistant":
                result.append(Message(role="user", content=waiting))
            elif waiting:
                message = replace(message, content=_joined(waiting, text))
            waiting = ""
            result.append(message)
        elif last is None:
            result.append(message)
        elif last.role == "assistant":
            waiting = text
        else:
            result[-1] = replace(last, content=_joined(str(last.content or ""), text))
    return [*result, Message(role="user", content=waiting)] if waiting else result


def _in_runs(messages: Iterable[Message]) -> Iterator[Message]:
    """System messages in a row as one: joined one by one, each would be copied for each that follows."""
    for is_system, group in groupby(messages, lambda message: message.role in SYSTEM_ROLES):
        first, *others = group
        if is_system and others:
            yield replace(first, content=_joined(*(str(message.content or "") for message in (first, *others))))
        else:
            yield from (first, *others)


def _joined(*texts: str) -> str:
    return GAP.join(filter(None, texts))
