"""What a tokenizer worker tells the detokenizer worker about a request, through an engine that never reads it.

Used by the two worker packages. Imports no tokenizer and no socket.
"""

from __future__ import annotations

import msgspec

from tokservice.wire.errors import WireError


class Context(msgspec.Struct, frozen=True, array_like=True):
    """Everything that shapes the response of one request; with the output ids it determines every byte of it."""

    route: int  # wire.messages.Route: completions or chat completions
    response_id: str
    created: int  # unix seconds
    model: str  # the served name
    n: int  # choices per prompt
    num_prompt_tokens: tuple[int, ...]  # of each prompt
    stream: bool
    include_usage: bool  # one more event at the end of a stream
    continuous_usage: bool  # and usage in every event
    stop: tuple[str, ...]
    include_stop: bool  # the matched stop string stays in the text
    skip_special_tokens: bool
    min_tokens: int  # stop strings do not count before
    bare_prompts: tuple[int, ...]  # prompts without any text (BOS alone): their output begins a text


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
