"""The response of one request: token ids of its choices in, finished SSE or JSON bytes out.

Detokenizer worker; pure: no socket, no clock. Its state is a function of the ids consumed, so that another worker
continues a request from the ids alone and writes the very bytes that this one would have written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tokservice.detokenizer import stop
from tokservice.detokenizer.choice import WORDLESS, ChoiceText
from tokservice.detokenizer.detail import TOKENS_AT_ONCE, Detail, detail, needs_detail, needs_log
from tokservice.detokenizer.logprob_rows import About, LogprobRows, read_note, write_note
from tokservice.detokenizer.prompt_report import PromptReporter
from tokservice.detokenizer.slices import Pace, Slices, at_once, joined
from tokservice.detokenizer.text_stream import TextStream
from tokservice.detokenizer.token_log import TokenLog
from tokservice.detokenizer.token_names import TokenNames
from tokservice.detokenizer.vocabulary import Vocabulary
from tokservice.protocol import context as contexts
from tokservice.protocol.context import Context
from tokservice.protocol.parts import Kind, Part, Piece, Usage
from tokservice.protocol.responses import response_format
from tokservice.wire.codec import MAX_ANSWER_BYTES, MAX_CHOICES
from tokservice.wire.errors import ANSWER_TOO_LARGE, ENGINE_FAILED, GUIDE_FAILED, RequestError, WireError
from tokservice.wire.messages import Buffer, FinishReason, Route

OK = 200
FEW = 16  # pieces of an event, which are joined at once
REPLAYED_AT_ONCE = 16  # tokens of an earlier attempt
FAILURES = {FinishReason.ERROR: ENGINE_FAILED, FinishReason.GUIDE_FAILED: GUIDE_FAILED}


class Fed(NamedTuple):
    """What came of some tokens of one choice."""

    choice: int
    data: Buffer = b""  # for the client
    num_consumed: int = 0  # tokens; those after a stop string are not
    finish_reason: FinishReason = FinishReason.RUNNING  # not RUNNING: the choice ended with these tokens
    status: int = 0  # not 0: ``data`` is a whole plain response with this HTTP status
    last: bool = False  # the response is complete
    note: bytes = b""  # for the journal, beside the tokens consumed: their logprobs


Work = Iterator[Fed | None]  # None: a slice is over


class Responder:
    """Writes the response of one request. What may take long is done in slices; one work after the other."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        context: bytes | memoryview,
        num_delivered: Sequence[int] = (),
        finished: Sequence[int] = (),
        output_ids: Sequence[Sequence[int]] = (),
        notes: Sequence[bytes | memoryview] = (),
    ) -> None:
        """Begin a request, or take it over: then the others hold, for each choice, how many of its output tokens the
        client has already seen, the FinishReason it reached, all of its output tokens so far, and its notes (``()``:
        none).

        Raises WireError for a malformed context, and where the others do not fit it.
        """
        self._context = contexts.decode(context)
        if len(self._context.prompt_ids) not in (0, len(self._context.num_prompt_tokens)):
            raise WireError("a context with an uneven number of prompts")
        if self._context.n * len(self._context.num_prompt_tokens) > MAX_CHOICES:
            raise WireError("a context with too many choices")
        self._format = response_format(self._context)
        self._choices, self._details = _choices(vocabulary, self._context)
        self._shown = [False] * len(self._choices)  # whether the client knows of the choice: its first event differs
        # Where events are numbered, or tokens of thoughts counted, each token has to be looked at alone.
        self._one_by_one = self._context.route == Route.RESPONSES or bool(self._context.reasoning)
        self._is_bare = self._context.stream and not self._details and not self._context.continuous_usage
        self._cached = [0] * len(self._context.num_prompt_tokens)  # prompt tokens found in the prefix cache
        self._num_running = len(self._choices)
        self._over = False
        self._pace = Pace()  # of the work that goes on
        notes = notes or (b"",) * len(output_ids)
        if not len(num_delivered) == len(finished) == len(output_ids) == len(notes) <= len(self._choices):
            raise WireError("a request was taken over with an uneven journal")
        self._journal = list(zip(output_ids, notes, num_delivered, map(FinishReason, finished), strict=True))

    @property
    def num_choices(self) -> int:
        """Of the request: those of ``feed`` and ``score_prompt`` are below it."""
        return len(self._choices)

    @property
    def stream(self) -> bool:
        """Whether the response is server-sent events."""
        return self._context.stream

    def has_ended(self, choice: int) -> bool:
        """Whether nothing more comes of a choice."""
        return self._over or self._choices[choice].finish_reason != FinishReason.RUNNING

    def begin(self) -> list[Fed]:
        """``beginning`` at once."""
        return [fed for fed in self.beginning() if fed is not None]

    def beginning(self) -> Work:
        """What a request that was taken over owes to its client; to be done once, before ``feed``.

        Raises WireError for malformed notes.
        """
        journal, self._journal = self._journal, []
        for choice, (token_ids, note, num_delivered, finished) in enumerate(journal):
            if token_ids or finished:
                rows = yield from self._read_note(choice, note, len(token_ids))
                yield from self._replay(choice, token_ids, rows, num_delivered, finished)
        failed = [FAILURES[text.finish_reason] for text in self._choices if text.finish_reason in FAILURES]
        if failed:
            yield (yield from self._fail(Fed(0), [], failed[0]))
        elif self._num_running == 0 and not self._over:
            yield (yield from self._close(Fed(0), []))

    def score_prompt(self, choice: int, rows: LogprobRows) -> None:
        """The logprobs of the prompt, before the first output of a choice; once known they stay."""
        if self._details and self._details[choice].prompt_rows is None:
            self._details[choice].prompt_rows = rows

    def feed(
        self,
        choice: int,
        token_ids: Sequence[int],
        finish_reason: FinishReason,
        num_cached_tokens: int = 0,
        rows: LogprobRows | None = None,
    ) -> Fed:
        """``feeding`` at once."""
        fed = self.feed_text(choice, token_ids, finish_reason, num_cached_tokens)
        work = self.feeding(choice, token_ids, finish_reason, num_cached_tokens, rows)
        return fed or next(fed for fed in work if fed is not None)

    def feed_text(
        self, choice: int, token_ids: Sequence[int], finish_reason: FinishReason, num_cached_tokens: int = 0
    ) -> Fed | None:
        """The short way of most tokens, which are text of a stream and no more. None: not for these."""
        text = self._choices[choice]
        is_brief = self._is_bare and not self._one_by_one and self._shown[choice]
        if not is_brief or finish_reason or num_cached_tokens or self.has_ended(choice):
            return None
        before = text.num_tokens
        shown = text.push(token_ids, finish_reason)
        if text.finish_reason:  # by a stop string
            fed = Fed(choice, b"", text.num_tokens - before, text.finish_reason)
            return at_once(self._told(fed, self._show(choice, shown)))
        return Fed(choice, self._format.delta(choice, shown) if shown else b"", text.num_tokens - before)

    def feeding(
        self,
        choice: int,
        token_ids: Sequence[int],
        finish_reason: FinishReason,
        num_cached_tokens: int = 0,
        rows: LogprobRows | None = None,
    ) -> Work:
        """Consume the tokens of one engine step; one Fed comes of it. A choice that has ended consumes nothing more."""
        text = self._choices[choice]
        if self.has_ended(choice):
            yield Fed(choice)
            return
        if num_cached_tokens and choice % self._context.n == 0:
            prompt = choice // self._context.n
            self._cached[prompt] = min(num_cached_tokens, self._context.num_prompt_tokens[prompt])
        self._pace.begin()
        before = text.num_tokens
        events = yield from self._consume(choice, token_ids, finish_reason, rows)
        num_consumed, reason = text.num_tokens - before, text.finish_reason
        note = self._note(choice, rows, num_consumed, is_first=not before) if self._details else b""
        if not (reason or self._is_too_large) and len(events) <= FEW:
            yield Fed(choice, b"".join(events), num_consumed, note=note)
        else:
            yield (yield from self._told(Fed(choice, b"", num_consumed, reason, note=note), events))

    # --- the journal

    def _note(self, choice: int, rows: LogprobRows | None, num_consumed: int, *, is_first: bool) -> bytes:
        """What a successor could not have from the token ids."""
        prompt_rows = self._details[choice].prompt_rows if is_first else None
        note = write_note(About.PROMPT, prompt_rows) if prompt_rows is not None else b""
        if rows is not None and num_consumed:
            note += write_note(About.OUTPUT, rows.part(0, num_consumed))
        return note

    def _read_note(self, choice: int, note: bytes | memoryview, num_tokens: int) -> Slices[LogprobRows | None]:
        """The rows of the output so far; those of the prompt are put in place."""
        if not self._details or not len(note):
            return None
        found = yield from read_note(note, self._pace)
        rows = found.get(About.OUTPUT)
        if rows is not None and len(rows) != num_tokens:
            raise WireError("a request was taken over with uneven notes")
        if About.PROMPT in found:
            self._details[choice].prompt_rows = found[About.PROMPT]
        return rows

    def _replay(
        self,
        choice: int,
        token_ids: Sequence[int],
        rows: LogprobRows | None,
        num_delivered: int,
        finished: FinishReason,
    ) -> Work:
        """Consume the output of earlier attempts; only what the client has not seen makes events."""
        text = self._choices[choice]
        unseen, unseen_rows = token_ids, rows
        if self._context.stream and (num_delivered or not token_ids):
            silent, unseen = token_ids[:num_delivered], token_ids[num_delivered:]
            silent_rows = rows and rows.part(0, num_delivered)
            unseen_rows = rows and rows.part(num_delivered, len(token_ids))
            reason = FinishReason.RUNNING if unseen else finished
            yield from self._consume_again(choice, silent, reason, silent_rows, is_seen=True)
        if not text.finish_reason:
            events = yield from self._consume_again(choice, unseen, finished, unseen_rows, is_seen=False)
            if events or text.finish_reason != finished:
                yield Fed(choice, (yield from joined(events, self._pace)), 0, text.finish_reason)
        self._num_running -= bool(text.finish_reason)

    def _consume_again(
        self,
        choice: int,
        token_ids: Sequence[int],
        finish_reason: FinishReason,
        rows: LogprobRows | None,
        *,
        is_seen: bool,
    ) -> Slices[list[bytes]]:
        """``_consume`` for any number of tokens; no events where the client has seen them."""
        events: list[bytes] = []
        for start in range(0, max(1, len(token_ids)), REPLAYED_AT_ONCE):
            end = min(start + REPLAYED_AT_ONCE, len(token_ids))
            finish = finish_reason if end == len(token_ids) else FinishReason.RUNNING
            more = yield from self._consume(choice, token_ids[start:end], finish, rows and rows.part(start, end))
            events += () if is_seen else more
            if self._choices[choice].finish_reason:
                break
            if self._pace.is_over(end - start):
                yield
        return events

    # --- bytes

    def _consume(
        self, choice: int, token_ids: Sequence[int], finish_reason: FinishReason, rows: LogprobRows | None
    ) -> Slices[list[bytes]]:
        """The events that some tokens make, in pieces: one for all of them, or, where something is counted, those that
        each would make alone: a successor, which replays many at once, has to count the same.
        """
        text = self._choices[choice]
        detail = self._details[choice] if self._details else None
        events: list[bytes] = []
        for some, finish, some_rows in self._portions(token_ids, finish_reason, rows):
            if detail is not None and not detail.has_begun and finish not in WORDLESS:
                yield from detail.begin(self._pace)
            shown = text.push(some, finish, some_rows)
            while detail is not None and detail.has_many_tokens:
                events += self._say(choice, detail.piece_of_tokens())
                if self._pace.is_over(TOKENS_AT_ONCE * (2 + self._context.num_logprobs)):
                    yield
            events += self._show(choice, shown)
            if text.finish_reason:
                break
            if detail is not None and self._pace.is_over(len(some) * (2 + self._context.num_logprobs) + len(shown)):
                yield
        return events

    def _portions(
        self, token_ids: Sequence[int], finish_reason: FinishReason, rows: LogprobRows | None
    ) -> Iterable[tuple[Sequence[int], FinishReason, LogprobRows | None]]:
        """Tokens to be consumed together: all, or one by one."""
        last = len(token_ids) - 1
        if not self._one_by_one or last < 1:
            return ((token_ids, finish_reason, rows),)
        return (
            (token_ids[i : i + 1], FinishReason.RUNNING if i < last else finish_reason, rows and rows.part(i, i + 1))
            for i in range(last + 1)
        )

    def _show(self, choice: int, shown: str) -> list[bytes]:
        """The event for some text of a choice, in pieces."""
        text = self._choices[choice]
        finish = text.finish_reason
        if self._is_bare and shown and not finish and self._shown[choice]:  # most tokens
            return [self._format.delta(choice, shown)]
        if finish in WORDLESS:
            return []
        if self._details:
            piece = self._details[choice].piece(text, shown)
        else:
            parts = [Part(Kind.CONTENT, shown)] if shown else []
            piece = Piece(parts, finish=finish, stop_string=text.stop_string)
        return self._say(choice, piece) if piece.parts or piece.tokens or piece.prompt or finish else []

    def _say(self, choice: int, piece: Piece) -> list[bytes]:
        """The event for a piece; of a plain response it is kept."""
        if not self._context.stream:
            self._format.keep(choice, piece)
            return []
        first, self._shown[choice] = not self._shown[choice], True
        return self._format.event(choice, piece, first=first, usage=self._choice_usage(choice))

    def _told(self, fed: Fed, events: list[bytes]) -> Slices[Fed]:
        """What came of tokens whose events are written."""
        error = ANSWER_TOO_LARGE if self._is_too_large else FAILURES.get(fed.finish_reason)
        self._num_running -= bool(fed.finish_reason)
        if error is not None:
            return (yield from self._fail(fed, events, error))
        if self._num_running == 0:
            return (yield from self._close(fed, events))
        return fed._replace(data=(yield from joined(events, self._pace)))

    def _close(self, fed: Fed, events: list[bytes]) -> Slices[Fed]:
        """The end of the response, once every choice has ended."""
        self._over = True
        if any(text.finish_reason == FinishReason.ABORT for text in self._choices):
            return fed._replace(data=(yield from joined(events, self._pace)), last=True)
        if self._context.stream:
            events += self._format.closing(self._usage())
            return fed._replace(data=(yield from joined(events, self._pace)), last=True)
        body = self._format.body(self._usage())
        if sum(map(len, body)) > MAX_ANSWER_BYTES:
            return (yield from self._fail(fed, events, ANSWER_TOO_LARGE))
        return fed._replace(data=(yield from joined(body, self._pace)), status=OK, last=True)

    def _fail(self, fed: Fed, events: list[bytes], error: RequestError) -> Slices[Fed]:
        """One choice cannot go on: the whole response ends."""
        self._over = True
        if self._context.stream:
            events += self._format.failure(error)
            return fed._replace(data=(yield from joined(events, self._pace)), last=True)
        return fed._replace(data=error.body(self._context.route), status=error.status, last=True)

    def _usage(self) -> Usage:
        num_output_tokens = sum(text.num_tokens for text in self._choices)
        num_reasoning_tokens = sum(detail.num_reasoning_tokens for detail in self._details)
        return Usage(sum(self._context.num_prompt_tokens), num_output_tokens, sum(self._cached), num_reasoning_tokens)

    @property
    def _is_too_large(self) -> bool:
        """Whether a plain response has more to say already than can be sent at once."""
        return self._format.num_kept > MAX_ANSWER_BYTES and not self._context.stream

    def _choice_usage(self, choice: int) -> Usage:
        prompt = choice // self._context.n
        num_output_tokens = self._choices[choice].num_tokens
        num_reasoning_tokens = self._details[choice].num_reasoning_tokens if self._details else 0
        return Usage(
            self._context.num_prompt_tokens[prompt], num_output_tokens, self._cached[prompt], num_reasoning_tokens
        )


def _choices(vocabulary: Vocabulary, context: Context) -> tuple[list[ChoiceText], list[Detail]]:
    """The choices, and their details where there are any."""
    with_marks = bool(context.tool_format or context.reasoning)
    early_table = vocabulary.table(skip_special=context.skip_special_tokens, with_marks=with_marks)
    table = vocabulary.table(skip_special=context.skip_special_tokens, with_marks=with_marks, stops=context.stop)
    stops = stop.compiled(context.stop) if context.stop else None
    bare = set(context.bare_prompts) if vocabulary.strips_leading_space else ()
    names = TokenNames(vocabulary, table, as_ids=context.tokens_as_ids)
    choices, details = [], []
    for prompt in range(len(context.num_prompt_tokens)):
        reporter = PromptReporter(vocabulary, context, prompt)
        for _ in range(context.n):
            log = None
            if needs_log(context):
                log = TokenLog(names, num_logprobs=context.num_logprobs, at_once=context.route == Route.GENERATE)
            stream = TextStream(early_table, strip_leading_space=prompt in bare)
            choices.append(
                ChoiceText(
                    stream,
                    stops,
                    include_stop=context.include_stop,
                    min_tokens=context.min_tokens,
                    stop_table=table,
                    log=log,
                )
            )
            if needs_detail(context):
                details.append(detail(context, log, reporter))
    return choices, details
