"""The finished bytes that clients read: SSE events and JSON bodies, in the form of each route.

Used by the detokenizer workers. Imports no tokenizer and no socket. Everything of an event but its text is
built once for each request, so that an event costs one JSON string and two concatenations.

A new route is a class with the methods of ``ResponseFormat`` and a line in ``response_format``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokservice import __version__
from tokservice.protocol.anthropic_format import MessagesFormat
from tokservice.protocol.chat_message import message_delta, whole_message
from tokservice.protocol.context import Context
from tokservice.protocol.json_text import json_text, json_value
from tokservice.protocol.logprobs import chat_logprobs, completion_logprobs, generate_logprobs, prompt_logprobs
from tokservice.protocol.parts import Piece, PromptReport, Usage
from tokservice.protocol.responses_api_format import ResponsesApiFormat
from tokservice.wire.errors import SSE_DONE, RequestError, sse_error
from tokservice.wire.messages import FinishReason, Route

_FINISH = {
    FinishReason.RUNNING: b"null",
    FinishReason.STOP: b'"stop"',
    FinishReason.LENGTH: b'"length"',
}
TOOL_CALLS = b'"tool_calls"'
FINGERPRINT = b',"system_fingerprint":"tokservice-%b"' % __version__.encode()


def usage_json(usage: Usage) -> bytes:
    """The ``usage`` object."""
    num_prompt_tokens, num_output_tokens, num_cached_tokens, num_reasoning_tokens = usage
    return (
        b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d},'
        b'"completion_tokens_details":{"reasoning_tokens":%d}}'
    ) % (
        num_prompt_tokens,
        num_output_tokens,
        num_prompt_tokens + num_output_tokens,
        num_cached_tokens,
        num_reasoning_tokens,
    )


class ResponseFormat(Protocol):
    """Writes the response of one request. What it writes depends on the pieces alone; what it adds up to never on their
    grouping.
    """

    def delta(self, choice: int, text: str) -> bytes:
        """The event of a choice that goes on with some content, not its first one: the fast way of most tokens."""

    def event(self, choice: int, piece: Piece, *, first: bool, usage: Usage) -> bytes:
        """Any event of a choice; ``usage`` is that of the choice so far."""

    def closing(self, usage: Usage) -> bytes:
        """What follows the last choice's end."""

    def failure(self, error: RequestError) -> bytes:
        """What ends a stream that cannot go on."""

    def body(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        """The whole JSON body of a plain response; a piece for each choice."""


def response_format(context: Context) -> ResponseFormat:
    """The format of a request."""
    match context.route:
        case Route.CHAT_COMPLETIONS:
            return ChatFormat(context)
        case Route.GENERATE:
            return GenerateFormat(context)
        case Route.MESSAGES:
            return MessagesFormat(context)
        case Route.RESPONSES:
            return ResponsesApiFormat(context)
    return CompletionFormat(context)


class CompletionFormat:
    """``/v1/completions``; the other formats of this file differ in the methods with an underscore."""

    object = chunk_object = b"text_completion"
    open_delta, close_delta = b'"text":', b""
    about_server = FINGERPRINT  # in a body, and in the event that ends a choice

    def __init__(self, context: Context) -> None:
        self._context = context
        self._told: tuple[PromptReport | None, bytes] = (None, b"")  # of the last prompt
        self._head = b'{"id":%b,"object":"%b","created":%d,"model":%b,' % (
            json_text(context.response_id),
            self.chunk_object if context.stream else self.object,
            context.created,
            json_text(context.model),
        )
        self._usage_null = b',"usage":null' if context.include_usage else b""
        num_choices = len(context.num_prompt_tokens) * context.n
        self._choice = [b'data: %b"choices":[{"index":%d,' % (self._head, index) for index in range(num_choices)]
        self._open = [choice + self.open_delta for choice in self._choice]
        self._running = b'%b,"logprobs":null,"finish_reason":null}]%b}\n\n' % (self.close_delta, self._usage_null)

    def delta(self, choice: int, text: str) -> bytes:
        """See ResponseFormat."""
        return self._open[choice] + json_text(text) + self._running

    def event(self, choice: int, piece: Piece, *, first: bool, usage: Usage) -> bytes:
        """See ResponseFormat."""
        about_usage = b',"usage":' + usage_json(usage) if self._context.continuous_usage else self._usage_null
        about_server = self.about_server if piece.finish else b""
        rest = self._rest(piece) + b"}]" + self._about_request(piece) + about_server + about_usage + b"}\n\n"
        return self._choice[choice] + self._delta(choice, piece, first=first) + rest

    def closing(self, usage: Usage) -> bytes:
        """See ResponseFormat."""
        if not self._context.include_usage:
            return SSE_DONE
        return b'data: %b"choices":[],"usage":%b}\n\n' % (self._head, usage_json(usage)) + SSE_DONE

    def failure(self, error: RequestError) -> bytes:
        """See ResponseFormat."""
        return sse_error(error)

    def body(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        """See ResponseFormat."""
        choices = [
            b'{"index":%d,%b%b}' % (index, self._whole(index, piece), self._rest(piece))
            for index, piece in enumerate(pieces)
        ]
        return b'%b"choices":[%b]%b%b,"usage":%b}' % (
            self._head,
            b",".join(choices),
            self._about_request(pieces[0]),
            self.about_server,
            usage_json(usage),
        )

    # --- what differs between routes

    def _delta(self, choice: int, piece: Piece, *, first: bool) -> bytes:
        """The fields of a choice that carry its text, in an event."""
        return self._whole(choice, piece)

    def _whole(self, choice: int, piece: Piece) -> bytes:
        """The same in a body."""
        echoed = piece.prompt.text if piece.prompt else ""
        return b'"text":' + json_text(echoed + piece.text)

    def _logprobs(self, piece: Piece) -> bytes:
        """The value of ``logprobs`` of a choice."""
        echoed = piece.prompt.entries if piece.prompt else ()
        return completion_logprobs([*echoed, *piece.tokens])

    def _about_choice(self, piece: Piece) -> bytes:
        """Further fields of a choice."""
        return self._about_prompt(piece.prompt)

    def _about_request(self, piece: Piece) -> bytes:
        """Further fields beside the choices."""
        return b""

    # --- what does not

    def _about_prompt(self, prompt: PromptReport | None) -> bytes:
        """What is told of a prompt, written once for all its choices."""
        if prompt is not self._told[0]:
            self._told = prompt, _about_prompt(prompt)
        return self._told[1]

    def _rest(self, piece: Piece) -> bytes:
        """The fields of a choice after its text."""
        finish = _FINISH[piece.finish]
        if piece.calls_tools and piece.finish == FinishReason.STOP:
            finish = TOOL_CALLS
        logprobs = self._logprobs(piece) if self._context.num_logprobs >= 0 else b"null"
        rest = b',"logprobs":%b,"finish_reason":%b%b' % (logprobs, finish, self._about_choice(piece))
        if self._context.return_token_ids:
            rest += b',"token_ids":' + _ids(piece)
        return rest


class ChatFormat(CompletionFormat):
    """``/v1/chat/completions``"""

    object, chunk_object = b"chat.completion", b"chat.completion.chunk"
    open_delta, close_delta = b'"delta":{"content":', b"}"
    about_server = FINGERPRINT + b',"service_tier":"default"'

    def _delta(self, choice: int, piece: Piece, *, first: bool) -> bytes:
        return b'"delta":' + message_delta(self._context, choice, piece, first=first)

    def _whole(self, choice: int, piece: Piece) -> bytes:
        return b'"message":' + whole_message(self._context, choice, piece)

    def _logprobs(self, piece: Piece) -> bytes:
        return chat_logprobs(piece.tokens)

    def _about_choice(self, piece: Piece) -> bytes:
        return b""

    def _about_request(self, piece: Piece) -> bytes:
        return self._about_prompt(piece.prompt)


class GenerateFormat(CompletionFormat):
    """``/generate``: token ids alone."""

    object, chunk_object = b"generate", b"generate.chunk"
    about_server = b""

    def _whole(self, choice: int, piece: Piece) -> bytes:
        return b'"token_ids":' + _ids(piece)

    def _logprobs(self, piece: Piece) -> bytes:
        return generate_logprobs(piece.tokens)


def _ids(piece: Piece) -> bytes:
    return json_value([entry.token_id for entry in piece.tokens])


def _about_prompt(prompt: PromptReport | None) -> bytes:
    fields = b""
    if prompt is not None and prompt.token_ids is not None:
        fields += b',"prompt_token_ids":' + json_value(list(prompt.token_ids))
    if prompt is not None and prompt.scores is not None:
        fields += b',"prompt_logprobs":' + prompt_logprobs(prompt.scores)
    return fields
