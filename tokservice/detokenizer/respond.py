"""The response of one request: token ids of its choices in, finished SSE or JSON bytes out.

Detokenizer worker; pure: no socket, no clock. Its state is a function of the ids consumed, so that another worker
continues a request from the ids alone and writes the very bytes that this one would have written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokservice.detokenizer import stop
from tokservice.detokenizer.choice import ChoiceText
from tokservice.detokenizer.text_stream import TextStream
from tokservice.detokenizer.vocabulary import Vocabulary
from tokservice.protocol import context as contexts
from tokservice.protocol.context import Context
from tokservice.protocol.responses import ResponseFormat, usage_json
from tokservice.wire.errors import ENGINE_FAILED, SSE_DONE, WireError, sse_error
from tokservice.wire.messages import FinishReason

OK = 200


class Fed(NamedTuple):
    """What came of some tokens of one choice."""

    choice: int
    data: bytes = b""  # for the client
    num_consumed: int = 0  # tokens; those after a stop string are not
    finish_reason: FinishReason = FinishReason.RUNNING  # not RUNNING: the choice ended with these tokens
    status: int = 0  # not 0: ``data`` is a whole plain response with this HTTP status
    last: bool = False  # the response is complete


class Responder:
    """Writes the response of one request."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        context: bytes | memoryview,
        num_delivered: Sequence[int] = (),
        finished: Sequence[int] = (),
        output_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        """Begin a request, or take it over: then the last three hold, for each choice, how many of its output
        tokens the client has already seen, the FinishReason it reached, and all of its output tokens so far.

        Raises WireError for a malformed context, and where the last three do not fit it.
        """
        self._context = contexts.decode(context)
        self._format = ResponseFormat(self._context)
        self._choices = _choices(vocabulary, self._context)
        self._shown = [False] * len(self._choices)  # whether the client knows of the choice: its first event differs
        self._texts: list[list[str]] = [[] for _ in self._choices]  # of a plain response
        self._cached = [0] * len(self._context.num_prompt_tokens)  # prompt tokens found in the prefix cache
        self._num_running = len(self._choices)
        self._over = False
        self._owed: list[Fed] = []
        if not len(num_delivered) == len(finished) == len(output_ids) <= len(self._choices):
            raise WireError("a request was taken over with an uneven journal")
        for choice, token_ids in enumerate(output_ids):
            self._replay(choice, token_ids, num_delivered[choice], FinishReason(finished[choice]))

    @property
    def stream(self) -> bool:
        """Whether the response is server-sent events."""
        return self._context.stream

    def begin(self) -> list[Fed]:
        """What a request that was taken over owes to its client at once; to be called once, before ``feed``."""
        owed, self._owed = self._owed, []
        if self._num_running == 0 and not self._over:
            owed.append(self._close(Fed(0)))
        return owed

    def feed(
        self, choice: int, token_ids: Sequence[int], finish_reason: FinishReason, num_cached_tokens: int = 0
    ) -> Fed:
        """Consume the tokens of one engine step. A choice that has ended consumes nothing more."""
        text = self._choices[choice]
        if self._over or text.finish_reason:
            return Fed(choice)
        if num_cached_tokens and choice % self._context.n == 0:
            prompt = choice // self._context.n
            self._cached[prompt] = min(num_cached_tokens, self._context.num_prompt_tokens[prompt])
        before = text.num_tokens
        data = self._show(choice, text.push(token_ids, finish_reason))
        fed = Fed(choice, data, text.num_tokens - before, text.finish_reason)
        if not text.finish_reason:
            return fed
        self._num_running -= 1
        if text.finish_reason == FinishReason.ERROR:
            return self._fail(fed)
        return self._close(fed) if self._num_running == 0 else fed

    def _replay(self, choice: int, token_ids: Sequence[int], num_delivered: int, finished: FinishReason) -> None:
        """Consume the output of earlier attempts; only what the client has not seen makes events."""
        text = self._choices[choice]
        unseen = token_ids
        if self._context.stream:
            silent, unseen = token_ids[:num_delivered], token_ids[num_delivered:]
            self._shown[choice] = bool(text.push(silent, FinishReason.RUNNING if unseen else finished))
        if not text.finish_reason:
            data = self._show(choice, text.push(unseen, finished))
            if data or text.finish_reason != finished:
                self._owed.append(Fed(choice, data, 0, text.finish_reason))
        if text.finish_reason:
            self._num_running -= 1

    def _show(self, choice: int, shown: str) -> bytes:
        """The event for some text of a choice; of a plain response the text is kept."""
        text = self._choices[choice]
        if not self._context.stream:
            self._texts[choice].append(shown)
            return b""
        finish = text.finish_reason
        if finish in (FinishReason.ABORT, FinishReason.ERROR) or not (shown or finish):
            return b""
        if self._shown[choice] and not finish and not self._context.continuous_usage:
            return self._format.delta(choice, shown)
        first, self._shown[choice] = not self._shown[choice], True
        usage = self._choice_usage(choice) if self._context.continuous_usage else b""
        return self._format.event(choice, shown, finish, first=first, usage=usage)

    def _close(self, fed: Fed) -> Fed:
        """The end of the response, once every choice has ended."""
        self._over = True
        if any(text.finish_reason == FinishReason.ABORT for text in self._choices):
            return fed._replace(last=True)
        if self._context.stream:
            usage = self._format.usage_event(self._usage()) if self._context.include_usage else b""
            return fed._replace(data=fed.data + usage + SSE_DONE, last=True)
        texts = ["".join(parts) for parts in self._texts]
        finishes = [text.finish_reason for text in self._choices]
        return fed._replace(data=self._format.body(texts, finishes, self._usage()), status=OK, last=True)

    def _fail(self, fed: Fed) -> Fed:
        """The engine gave up on one choice: the whole response ends."""
        self._over = True
        if self._context.stream:
            return fed._replace(data=sse_error(ENGINE_FAILED), last=True)
        return fed._replace(data=ENGINE_FAILED.body(), status=ENGINE_FAILED.status, last=True)

    def _usage(self) -> bytes:
        num_output_tokens = sum(text.num_tokens for text in self._choices)
        return usage_json(sum(self._context.num_prompt_tokens), num_output_tokens, sum(self._cached))

    def _choice_usage(self, choice: int) -> bytes:
        prompt = choice // self._context.n
        num_output_tokens = self._choices[choice].num_tokens
        return usage_json(self._context.num_prompt_tokens[prompt], num_output_tokens, self._cached[prompt])


def _choices(vocabulary: Vocabulary, context: Context) -> list[ChoiceText]:
    table = vocabulary.visible_bytes if context.skip_special_tokens else vocabulary.all_bytes
    stops = stop.compiled(context.stop) if context.stop else None
    bare = set(context.bare_prompts) if vocabulary.strips_leading_space else ()
    return [
        ChoiceText(
            TextStream(table, strip_leading_space=prompt in bare),
            stops,
            include_stop=context.include_stop,
            min_tokens=context.min_tokens,
        )
        for prompt in range(len(context.num_prompt_tokens))
        for _ in range(context.n)
    ]
