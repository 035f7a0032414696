"""The finished bytes that clients read: SSE events and JSON bodies of completions and chat completions.

Used by the detokenizer workers. Imports no tokenizer and no socket. Everything of an event but its text is
built once for each request, so that an event costs one JSON string and two concatenations.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from tokservice.protocol.context import Context
from tokservice.wire.messages import FinishReason, Route

_FINISH = {
    FinishReason.RUNNING: b"null",
    FinishReason.STOP: b'"stop"',
    FinishReason.LENGTH: b'"length"',
}


def json_text(text: str) -> bytes:
    """A JSON string that no line reader splits.

    Control characters are escaped by JSON itself; the line ends that JSON allows and that some clients honour
    (U+0085, U+2028, U+2029) are escaped too.
    """
    data = orjson.dumps(text)
    if not text.isascii():
        data = data.replace(b"\xc2\x85", b"\\u0085")
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return data


def usage_json(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> bytes:
    """The ``usage`` object."""
    return (
        b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'
    ) % (num_prompt_tokens, num_output_tokens, num_prompt_tokens + num_output_tokens, num_cached_tokens)


class ResponseFormat:
    """Writes the response of one request."""

    def __init__(self, context: Context) -> None:
        self._chat = context.route == Route.CHAT_COMPLETIONS
        kind = ("chat.completion.chunk" if context.stream else "chat.completion") if self._chat else "text_completion"
        self._head = b'{"id":%b,"object":"%b","created":%d,"model":%b,' % (
            json_text(context.response_id),
            kind.encode(),
            context.created,
            json_text(context.model),
        )
        self._usage_null = b',"usage":null' if context.include_usage else b""
        field = b'"delta":{"content":' if self._chat else b'"text":'
        num_choices = len(context.num_prompt_tokens) * context.n
        self._choice = [b'data: %b"choices":[{"index":%d,' % (self._head, index) for index in range(num_choices)]
        self._open = [choice + field for choice in self._choice]
        brace = b"}" if self._chat else b""
        self._close = {
            finish: b'%b,"logprobs":null,"finish_reason":%b}]' % (brace, word) for finish, word in _FINISH.items()
        }
        self._running = self._close[FinishReason.RUNNING] + self._usage_null + b"}\n\n"

    def delta(self, choice: int, text: str) -> bytes:
        """The event of a choice that goes on, not its first one."""
        return self._open[choice] + json_text(text) + self._running

    def event(self, choice: int, text: str, finish: FinishReason, *, first: bool, usage: bytes = b"") -> bytes:
        """Any event of a choice: its first one, its last one, one with usage."""
        if not self._chat:
            field = b'"text":' + json_text(text)
        elif first:
            field = b'"delta":{"role":"assistant","content":' + json_text(text)
        else:
            field = b'"delta":{"content":' + json_text(text) if text else b'"delta":{'
        usage = b',"usage":' + usage if usage else self._usage_null
        return self._choice[choice] + field + self._close[finish] + usage + b"}\n\n"

    def usage_event(self, usage: bytes) -> bytes:
        """The event after the last choice's end, without choices."""
        return b'data: %b"choices":[],"usage":%b}\n\n' % (self._head, usage)

    def body(self, texts: Sequence[str], finishes: Sequence[FinishReason], usage: bytes) -> bytes:
        """The whole JSON body of a plain response."""
        field = b'"message":{"role":"assistant","content":%b}' if self._chat else b'"text":%b'
        choices = [
            b'{"index":%d,%b,"logprobs":null,"finish_reason":%b}' % (index, field % json_text(text), _FINISH[finish])
            for index, (text, finish) in enumerate(zip(texts, finishes, strict=True))
        ]
        return b'%b"choices":[%b],"usage":%b}' % (self._head, b",".join(choices), usage)
