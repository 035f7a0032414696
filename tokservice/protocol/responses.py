"""The finished bytes that clients read: SSE events and JSON bodies, in the form of each route.

Used by the detokenizer workers. Imports no tokenizer and no socket. Everything of an event but its text is
built once for each request, so that an event costs one JSON string and two concatenations.

A new route is a class with the methods of ``ResponseFormat`` and a line in ``response_format``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tokservice import __version__
from tokservice.protocol.anthropic_format import MessagesFormat
from tokservice.protocol.chat_message import message_delta, whole_message
from tokservice.protocol.context import Context
from tokservice.protocol.growing_json import JsonList, JsonString, one_string
from tokservice.protocol.json_text import json_text, json_value
from tokservice.protocol.logprobs import CHAT_LOGPROBS, COMPLETION_LOGPROBS, GENERATE_LOGPROBS, Form, Logprobs
from tokservice.protocol.parts import Piece, PromptReport, Usage, Whole
from tokservice.protocol.responses_api_format import ResponsesApiFormat
from tokservice.protocol.token_entry import TokenEntry
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

    What may be large comes in pieces: all that was said before is there already, and only to be put together.
    """

    num_kept: int  # bytes of a plain response that are there so far, about

    def delta(self, choice: int, text: str) -> bytes:
        """The event of a choice that goes on with some content, not its first one: the fast way of most tokens."""

    def event(self, choice: int, piece: Piece, *, first: bool, usage: Usage) -> list[bytes]:
        """Any event of a choice; ``usage`` is that of the choice so far."""

    def closing(self, usage: Usage) -> list[bytes]:
        """What follows the last choice's end."""

    def failure(self, error: RequestError) -> list[bytes]:
        """What ends a stream that cannot go on."""

    def keep(self, choice: int, piece: Piece) -> None:
        """Of a plain response: what an event would say goes into the body."""

    def body(self, usage: Usage) -> list[bytes]:
        """The whole JSON body of a plain response, all of whose choices have ended."""


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


class _Kept:
    """What a plain response says about a choice."""

    def __init__(self, form: Form, prompt: PromptReport | None) -> None:
        self.whole = Whole()
        self.logprobs = Logprobs(form, prompt.logprobs if prompt else None)
        self.ids = JsonList()

    def __len__(self) -> int:
        """About the bytes of what it says about tokens."""
        return len(self.logprobs) + len(self.ids)


class CompletionFormat:
    """``/v1/completions``; the other formats of this file differ in the methods with an underscore."""

    object = chunk_object = b"text_completion"
    open_delta, close_delta = b'"text":', b""
    about_server = FINGERPRINT  # in a body, and in the event that ends a choice
    logprob_form = COMPLETION_LOGPROBS

    def __init__(self, context: Context) -> None:
        self._context = context
        self._tells_ids = context.return_token_ids or context.route == Route.GENERATE
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
        self._kept: dict[int, _Kept] = {}  # by choice
        self.num_kept = 0  # see ResponseFormat

    def delta(self, choice: int, text: str) -> bytes:
        """See ResponseFormat."""
        return self._open[choice] + json_text(text) + self._running

    def event(self, choice: int, piece: Piece, *, first: bool, usage: Usage) -> list[bytes]:
        """See ResponseFormat."""
        ids = [_ids(piece.tokens)] if self._tells_ids else []
        about_usage = b',"usage":' + usage_json(usage) if self._context.continuous_usage else self._usage_null
        about_server = self.about_server if piece.finish else b""
        return [
            self._choice[choice],
            *self._delta(choice, piece, ids, first=first),
            *self._rest(piece, self._logprobs(piece), ids),
            b"}]",
            *self._about_request(piece.prompt),
            about_server + about_usage + b"}\n\n",
        ]

    def closing(self, usage: Usage) -> list[bytes]:
        """See ResponseFormat."""
        if not self._context.include_usage:
            return [SSE_DONE]
        return [b'data: %b"choices":[],"usage":%b}\n\n' % (self._head, usage_json(usage)), SSE_DONE]

    def failure(self, error: RequestError) -> list[bytes]:
        """See ResponseFormat."""
        return [sse_error(error)]

    def keep(self, choice: int, piece: Piece) -> None:
        """See ResponseFormat."""
        if choice not in self._kept:
            self._kept[choice] = _Kept(self.logprob_form, piece.prompt)
        kept = self._kept[choice]
        self.num_kept += kept.whole.add(piece)
        if piece.tokens:
            self.num_kept -= len(kept)
            if self._context.num_logprobs >= 0:
                kept.logprobs.extend(piece.tokens)
            if self._tells_ids:
                kept.ids.join(_ids(piece.tokens))
            self.num_kept += len(kept)

    def body(self, usage: Usage) -> list[bytes]:
        """See ResponseFormat."""
        body = [self._head, b'"choices":[']
        for choice in range(len(self._choice)):
            kept = self._kept[choice]
            logprobs = kept.logprobs if self._context.num_logprobs >= 0 else [b"null"]
            body.append(b'%b{"index":%d,' % (b"," if choice else b"", choice))
            body += self._whole(choice, kept.whole, kept.ids)
            body += self._rest(kept.whole, logprobs, kept.ids)
            body.append(b"}")
        body.append(b"]")
        body += self._about_request(self._kept[0].whole.prompt)
        return [*body, self.about_server, b',"usage":%b}' % usage_json(usage)]

    # --- what differs between routes

    def _delta(self, choice: int, piece: Piece, ids: Iterable[bytes], *, first: bool) -> list[bytes]:
        """The fields of a choice that carry its text, in an event."""
        if piece.prompt is None or piece.prompt.text is None:
            return [b'"text":' + json_text(piece.text)]
        text = JsonString()
        text.add(piece.text)
        return [b'"text":', *one_string([piece.prompt.text, text])]

    def _whole(self, choice: int, whole: Whole, ids: Iterable[bytes]) -> list[bytes]:
        """The same in a body."""
        echo = [whole.prompt.text] if whole.prompt and whole.prompt.text else []
        return [b'"text":', *one_string([*echo, *[passage.text for passage in whole.passages]])]

    def _about_choice(self, prompt: PromptReport | None) -> list[bytes]:
        """Further fields of a choice."""
        return _about_prompt(prompt)

    def _about_request(self, prompt: PromptReport | None) -> list[bytes]:
        """Further fields beside the choices."""
        return []

    # --- what does not

    def _logprobs(self, piece: Piece) -> Iterable[bytes]:
        """The value of ``logprobs`` of a choice in an event."""
        if self._context.num_logprobs < 0:
            return [b"null"]
        if piece.prompt is None or piece.prompt.logprobs is None:
            return [self.logprob_form.written(piece.tokens)]
        logprobs = Logprobs(self.logprob_form, piece.prompt.logprobs)
        logprobs.extend(piece.tokens)
        return logprobs

    def _rest(self, about: Piece | Whole, logprobs: Iterable[bytes], ids: Iterable[bytes]) -> list[bytes]:
        """The fields of a choice after its text."""
        finish = _FINISH[about.finish]
        if about.calls_tools and about.finish == FinishReason.STOP:
            finish = TOOL_CALLS
        rest = [b',"logprobs":', *logprobs, b',"finish_reason":', finish, *self._about_choice(about.prompt)]
        return [*rest, b',"token_ids":', *ids] if self._context.return_token_ids else rest


class ChatFormat(CompletionFormat):
    """``/v1/chat/completions``"""

    object, chunk_object = b"chat.completion", b"chat.completion.chunk"
    open_delta, close_delta = b'"delta":{"content":', b"}"
    about_server = FINGERPRINT + b',"service_tier":"default"'
    logprob_form = CHAT_LOGPROBS

    def _delta(self, choice: int, piece: Piece, ids: Iterable[bytes], *, first: bool) -> list[bytes]:
        return [b'"delta":', message_delta(self._context, choice, piece, first=first)]

    def _whole(self, choice: int, whole: Whole, ids: Iterable[bytes]) -> list[bytes]:
        return [b'"message":', *whole_message(self._context, choice, whole.passages)]

    def _about_choice(self, prompt: PromptReport | None) -> list[bytes]:
        return []

    def _about_request(self, prompt: PromptReport | None) -> list[bytes]:
        return _about_prompt(prompt)


class GenerateFormat(CompletionFormat):
    """``/generate``: token ids alone."""

    object, chunk_object = b"generate", b"generate.chunk"
    about_server = b""
    logprob_form = GENERATE_LOGPROBS

    def _delta(self, choice: int, piece: Piece, ids: Iterable[bytes], *, first: bool) -> list[bytes]:
        return [b'"token_ids":', *ids]

    def _whole(self, choice: int, whole: Whole, ids: Iterable[bytes]) -> list[bytes]:
        return [b'"token_ids":', *ids]


def _ids(tokens: Iterable[TokenEntry]) -> bytes:
    return json_value([entry.token_id for entry in tokens])


def _about_prompt(prompt: PromptReport | None) -> list[bytes]:
    if prompt is None:
        return []
    fields = []
    if prompt.token_ids is not None:
        fields += [b',"prompt_token_ids":', *prompt.token_ids]
    if prompt.scores is not None:
        fields += [b',"prompt_logprobs":', *prompt.scores]
    return fields
