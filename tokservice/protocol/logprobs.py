"""Log-probabilities in the forms that clients read. Used by the detokenizer workers.

Completions: parallel lists, the most likely tokens as a mapping from token to logprob, the sampled token among
them. Chat completions: a list of objects, with the bytes of each token.

What grows is written as it comes and kept as bytes. An answer may hold hundreds of thousands of entries: as many
objects would stop the process whenever it writes them, lets go of them or looks for garbage among them.

JSON has no infinity: whatever is below ``FLOOR`` (a token that a mask excluded) is written as ``FLOOR``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from tokservice.protocol.growing_json import JsonList
from tokservice.protocol.json_text import json_value
from tokservice.protocol.token_entry import TokenEntry

FLOOR = -9999.0


def floored(logprob: float) -> float:
    """A finite logprob; NaN too becomes the floor."""
    return logprob if logprob > FLOOR else FLOOR


class Form(NamedTuple):
    """How tokens are told of: lists with a value for each token."""

    lists: tuple[tuple[bytes, Callable[[TokenEntry], Any]], ...]  # what stands before each, and its values
    after: bytes = b""

    def written(self, entries: Sequence[TokenEntry]) -> bytes:
        """The JSON value for these tokens."""
        return b"".join([before + json_value(list(map(value, entries))) for before, value in self.lists]) + self.after


class Logprobs:
    """The same for tokens that come one after the other."""

    def __init__(self, form: Form, beginning: Logprobs | None = None) -> None:
        """``beginning``: of the same form; what it holds now comes first."""
        self._form = form
        self._lists: list[JsonList] = [JsonList() for _ in form.lists]
        if beginning is not None:
            self._lists = [values.copy() for values in beginning._lists]

    def __len__(self) -> int:
        """About its bytes."""
        return sum(map(len, self._lists))

    def __iter__(self) -> Iterator[bytes]:
        """The JSON value for all of them so far, in pieces."""
        for (before, _), values in zip(self._form.lists, self._lists, strict=True):
            yield before
            yield from values
        yield self._form.after

    def extend(self, entries: Sequence[TokenEntry]) -> None:
        """More of them."""
        for (_, value), values in zip(self._form.lists, self._lists, strict=True):
            values.extend(list(map(value, entries)))


def text_logprob(entry: TokenEntry) -> dict[str, Any]:
    """A token of a chat, and of a text of the Responses API."""
    top = [{"token": one.text, "logprob": one.logprob, "bytes": list(one.data)} for one in entry.top]
    return {"token": entry.text, "logprob": entry.logprob, "bytes": list(entry.data), "top_logprobs": top}


def _mapping(entry: TokenEntry) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    top: dict[str, float] = {}
    for alternative in entry.top:
        top.setdefault(alternative.text, alternative.logprob)
    top.setdefault(entry.text, entry.logprob)
    return top


def _id_logprob(entry: TokenEntry) -> dict[str, Any]:
    """Ids in place of texts."""
    top = [{"token_id": one.token_id, "logprob": one.logprob} for one in entry.top]
    return {"token_id": entry.token_id, "logprob": entry.logprob, "top_logprobs": top}


def _prompt_logprob(entry: TokenEntry) -> dict[str, Any] | None:
    """A mapping from token id to what is known of it; of the first prompt token there is none."""
    if entry.logprob is None:
        return None
    row = {
        str(one.token_id): {"logprob": one.logprob, "rank": rank, "decoded_token": one.text}
        for rank, one in enumerate(entry.top, start=1)
    }
    row.setdefault(str(entry.token_id), {"logprob": entry.logprob, "rank": None, "decoded_token": entry.text})
    return row


COMPLETION_LOGPROBS = Form(
    (
        (b'{"tokens":', attrgetter("text")),
        (b',"token_logprobs":', attrgetter("logprob")),
        (b',"top_logprobs":', _mapping),
        (b',"text_offset":', attrgetter("offset")),
    ),
    b"}",
)
CHAT_LOGPROBS = Form(((b'{"content":', text_logprob),), b',"refusal":null}')
GENERATE_LOGPROBS = Form(((b"", _id_logprob),))
PROMPT_LOGPROBS = Form(((b"", _prompt_logprob),))
