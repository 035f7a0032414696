"""Whether the answers to a prompt begin with the model's thoughts. Tokenizer worker; pure."""

from __future__ import annotations

OPENING_TAG = "<think>"


def reasoning_of(parser: str, prompt: str, *, is_guided: bool) -> str:
    """``Context.reasoning`` for a rendered prompt. ``parser``: model.reasoning_parser.

    Some templates open the thoughts themselves, so that the model writes the closing tag alone. A guided answer has
    no thoughts.
    """
    if not parser:
        return ""
    if prompt.rstrip().endswith(OPENING_TAG):
        return "" if is_guided else "open"
    return "tagged"
