"""The model's thoughts: whether answers begin with them, and what a request may say about them.

Tokenizer worker; pure.
"""

from __future__ import annotations

from typing import Any

from tokservice.protocol.context import CLOSING_TAG, OPENING_TAG
from tokservice.tokenizer.traits import Traits
from tokservice.wire.errors import RequestError

EFFORT = "reasoning_effort"  # the variables by which chat templates know of effort,
SWITCHES = frozenset({"enable_thinking", "thinking"})  # and of whether to think at all
NO_EFFORT = "none"


def reasoning_of(parser: str, prompt: str, begun: str, *, is_guided: bool) -> str:
    """``Context.reasoning`` for a rendered prompt, and the beginning of the answer that it continues ("": none).
    ``parser``: model.reasoning_parser.

    Some templates open the thoughts themselves, so that the model writes the closing tag alone; so does a client that
    has the model continue thoughts. A guided answer has no thoughts.
    """
    if not parser:
        return ""
    if prompt.rstrip().endswith(OPENING_TAG):
        return "" if is_guided else "open"
    if begun.rfind(OPENING_TAG) > begun.rfind(CLOSING_TAG):
        return "" if is_guided else "inside"
    return "tagged"


def thinking_variables(traits: Traits, *, thinks: bool) -> dict[str, Any]:
    """Variables that turn the model's thoughts on or off: none where its template knows none, or where thoughts would
    come as a part of the text.
    """
    return dict.fromkeys(SWITCHES & traits.variables, thinks) if traits.tells_thoughts or not thinks else {}


def with_effort(
    variables: dict[str, Any] | None, effort: str | None, traits: Traits, *, param: str
) -> dict[str, Any] | None:
    """A request's variables of the template, and its effort as one of them. Any effort but none turns thoughts on: some
    templates do not, unless they are told. Raises RequestError (400).
    """
    if effort is None:
        return variables
    asked = effort_variables(traits, effort)
    thoughts = {} if effort == NO_EFFORT else thinking_variables(traits, thinks=True)
    if not (asked or thoughts):
        message = (
            f"This model knows no effort of reasoning, or not {effort!r}: its chat template has no variable for it."
        )
        raise RequestError(message, param=param, code="unsupported")
    return {**thoughts, **(variables or {}), **asked}


def effort_variables(traits: Traits, effort: str) -> dict[str, Any]:
    """Variables that ask for an effort; none: the model knows no such effort."""
    asked = {EFFORT: effort} if EFFORT in traits.variables else {}
    return asked | thinking_variables(traits, thinks=False) if effort == NO_EFFORT else asked
