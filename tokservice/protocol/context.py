"""What a tokenizer worker tells the detokenizer worker about a request, through an engine that never reads it.

Used by the two worker packages. Imports no tokenizer and no socket.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tokservice.wire.errors import WireError

OPENING_TAG, CLOSING_TAG = "<think>", "</think>"  # around a model's thoughts


class Context(msgspec.Struct, frozen=True, array_like=True):
    """Everything that shapes the response of one request; with the output ids it determines every byte of it."""

    route: int  # wire.messages.Route: completions or chat completions
    response_id: str
    created: int  # unix seconds
    model: str  # the served name
    n: Annotated[int, Meta(ge=1)]  # choices per prompt
    num_prompt_tokens: Annotated[tuple[int, ...], Meta(min_length=1)]  # of each prompt
    stream: bool
    include_usage: bool  # one more event at the end of a stream
    continuous_usage: bool  # and usage in every event
    stop: tuple[str, ...]
    include_stop: bool  # the matched stop string stays in the text
    skip_special_tokens: bool
    min_tokens: int  # stop strings do not count before
    bare_prompts: tuple[int, ...]  # prompts without any text (BOS alone): their output begins a text
    num_logprobs: int = -1  # of output tokens: -1 none, 0 the token's own, N of the N most likely too
    num_prompt_logprobs: int = -1  # the same of prompt tokens, to be shown apart from the output
    echo: bool = False  # the prompt comes first in the text
    prompt_texts: tuple[str | None, ...] = ()  # to echo, as the client wrote them; None: the text of the ids
    prompt_ids: tuple[bytes, ...] = ()  # little-endian uint32; () where nothing is said about the prompt
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # tokens in logprobs are written as "token_id:5"
    tool_format: str = ""  # how the model writes tool calls: one of detokenizer.tool_parsers; "" is text alone
    tool_names: tuple[str, ...] = ()
    custom_tools: tuple[str, ...] = ()  # those of them whose input is a text
    parallel_tool_calls: bool = True
    reasoning: str = ""  # "": none; "tagged": after an opening tag; in the prompt "open": opened; "inside": begun
    omits_thoughts: bool = False  # an answer of the Messages API says that there were thoughts, and not which
    namespaces: dict[str, str] = {}  # by tools' whole names, of those that have one
    more_fields: bytes = b"{}"  # what the request adds to its response: a JSON object


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Context)


def encode(context: Context) -> bytes:
    """The frame that travels through the engine."""
    return _encoder.encode(context)


def decode(frame: bytes | memoryview) -> Context:
    """Read what ``encode`` wrote. Raises WireError."""
    try:
        return _decoder.decode(frame)
    except msgspec.DecodeError as error:
        raise WireError(f"malformed context: {error}") from error
