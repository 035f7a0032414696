"""Log-probabilities in the two forms that clients read. Used by the detokenizer workers.

Completions: parallel lists, the most likely tokens as a mapping from token to logprob, the sampled token among
them. Chat completions: a list of objects, with the bytes of each token.

JSON has no infinity: whatever is below ``FLOOR`` (a token that a mask excluded) is written as ``FLOOR``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokservice.protocol.json_text import json_value
from tokservice.protocol.parts import TokenEntry

FLOOR = -9999.0


def floored(logprob: float) -> float:
    """A finite logprob; NaN too becomes the floor."""
    return logprob if logprob > FLOOR else FLOOR


def completion_logprobs(entries: Sequence[TokenEntry]) -> bytes:
    """``logprobs`` of a completion."""
    top_logprobs: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprob is None:
            top_logprobs.append(None)
            continue
        top: dict[str, float] = {}
        for alternative in entry.top:
            top.setdefault(alternative.text, alternative.logprob)
        top.setdefault(entry.text, entry.logprob)
        top_logprobs.append(top)
    return json_value(
        {
            "tokens": [entry.text for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": top_logprobs,
            "text_offset": [entry.offset for entry in entries],
        }
    )


def chat_logprobs(entries: Sequence[TokenEntry]) -> bytes:
    """``logprobs`` of a chat completion."""
    return json_value({"content": text_logprobs(entries), "refusal": None})


def text_logprobs(entries: Sequence[TokenEntry]) -> list[dict[str, Any]]:
    """The list in it, which is also that of a text of the Responses API."""
    content = []
    for entry in entries:
        top = [{"token": one.text, "logprob": one.logprob, "bytes": list(one.data)} for one in entry.top]
        content.append({"token": entry.text, "logprob": entry.logprob, "bytes": list(entry.data), "top_logprobs": top})
    return content


def generate_logprobs(entries: Sequence[TokenEntry]) -> bytes:
    """``logprobs`` of ``/generate``: ids in place of texts."""
    return json_value(
        [
            {
                "token_id": entry.token_id,
                "logprob": entry.logprob,
                "top_logprobs": [{"token_id": one.token_id, "logprob": one.logprob} for one in entry.top],
            }
            for entry in entries
        ]
    )


def prompt_logprobs(scores: Sequence[TokenEntry]) -> bytes:
    """``prompt_logprobs``: for each prompt token but the first a mapping from token id to what is known of it."""
    rows: list[dict[str, Any] | None] = []
    for entry in scores:
        if entry.logprob is None:
            rows.append(None)
            continue
        row = {
            str(one.token_id): {"logprob": one.logprob, "rank": rank, "decoded_token": one.text}
            for rank, one in enumerate(entry.top, start=1)
        }
        row.setdefault(str(entry.token_id), {"logprob": entry.logprob, "rank": None, "decoded_token": entry.text})
        rows.append(row)
    return json_value(rows)
