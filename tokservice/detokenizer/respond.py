"""The response of one request: token ids of its choices in, finished SSE or JSON bytes out.

Detokenizer worker; pure: no socket, no clock. Its state is a function of the ids consumed, so that another worker
continues a request from the ids alone and writes the very bytes that this one would have written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokservice.detokenizer import stop
from tokservice.detokenizer.choice import WORDLESS, ChoiceText
from tokservice.detokenizer.detail import Detail, detail, needs_detail, needs_log
from tokservice.detokenizer.logprob_rows import About, LogprobRows, read_note, write_note
from tokservice.detokenizer.prompt_report import PromptReporter
from tokservice.detokenizer.text_stream import TextStream
from tokservice.detokenizer.token_log import TokenLog
from tokservice.detokenizer.token_names import TokenNames
from tokservice.detokenizer.vocabulary import Vocabulary
from tokservice.protocol import context as contexts
from tokservice.protocol.context import Context
from tokservice.protocol.parts import Kind, Part, Piece, Usage, merged
from tokservice.protocol.responses import response_format
from tokservice.wire.codec import MAX_ANSWER_BYTES, MAX_CHOICES
from tokservice.wire.errors import ANSWER_TOO_LARGE, ENGINE_FAILED, GUIDE_FAILED, RequestError, WireError
from tokservice.wire.messages import FinishReason, Route

OK = 200
MAX_KEPT = 1 << 21  # pieces, tokens and logprobs that a plain response may gather: up to 1 GB
FAILURES = {FinishReason.ERROR: ENGINE_FAILED, FinishReason.GUIDE_FAILED: GUIDE_FAILED}


class Fed(NamedTuple):
    """What came of some tokens of one choice."""

    choice: int
    data: bytes = b""  # for the client
    num_consumed: int = 0  # tokens; those after a stop string are not
    finish_reason: FinishReason = FinishReason.RUNNING  # not RUNNING: the choice ended with these tokens
    status: int = 0  # not 0: ``data`` is a whole plain response with this HTTP status
    last: bool = False  # the response is complete
    note: bytes = b""  # for the journal, beside the tokens consumed: their logprobs


class Responder:
    """Writes the response of one request."""

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
        self._pieces: list[list[Piece]] = [[] for _ in self._choices]  # of a plain response
        self._num_kept = 0  # entries in them
        # Where events are numbered, or tokens of thoughts counted, each token has to be looked at alone.
        self._one_by_one = self._context.route == Route.RESPONSES or bool(self._context.reasoning)
        self._is_bare = self._context.stream and not self._details and not self._context.continuous_usage
        self._cached = [0] * len(self._context.num_prompt_tokens)  # prompt tokens found in the prefix cache
        self._num_running = len(self._choices)
        self._over = False
        self._owed: list[Fed] = []
        notes = notes or (b"",) * len(output_ids)
        if not len(num_delivered) == len(finished) == len(output_ids) == len(notes) <= len(self._choices):
            raise WireError("a request was taken over with an uneven journal")
        for choice, token_ids in enumerate(output_ids):
            if token_ids or finished[choice]:
                rows = self._read_note(choice, notes[choice], len(token_ids))
                self._replay(choice, token_ids, rows, num_delivered[choice], FinishReason(finished[choice]))

    @property
    def num_choices(self) -> int:
        """Of the request: those of ``feed`` and ``score_prompt`` are below it."""
        return len(self._choices)

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
        """Consume the tokens of one engine step. A choice that has ended consumes nothing more."""
        text = self._choices[choice]
        if self._over or text.finish_reason:
            return Fed(choice)
        if num_cached_tokens and choice % self._context.n == 0:
            prompt = choice // self._context.n
            self._cached[prompt] = min(num_cached_tokens, self._context.num_prompt_tokens[prompt])
        before = text.num_tokens
        is_first = not before
        data = self._consume(choice, token_ids, finish_reason, rows)
        fed = Fed(choice, data, text.num_tokens - before, text.finish_reason)
        if self._details:
            fed = fed._replace(note=self._note(choice, rows, fed.num_consumed, is_first=is_first))
        if self._num_kept > MAX_KEPT:
            return self._fail(fed, ANSWER_TOO_LARGE)
        if not text.finish_reason:
            return fed
        self._num_running -= 1
        if text.finish_reason in FAILURES:
            return self._fail(fed, FAILURES[text.finish_reason])
        return self._close(fed) if self._num_running == 0 else fed

    # --- the journal

    def _note(self, choice: int, rows: LogprobRows | None, num_consumed: int, *, is_first: bool) -> bytes:
        """What a successor could not have from the token ids."""
        prompt_rows = self._details[choice].prompt_rows if is_first else None
        note = write_note(About.PROMPT, prompt_rows) if prompt_rows is not None else b""
        if rows is not None and num_consumed:
            note += write_note(About.OUTPUT, rows.part(0, num_consumed))
        return note

    def _read_note(self, choice: int, note: bytes | memoryview, num_tokens: int) -> LogprobRows | None:
        """The rows of the output so far; those of the prompt are put in place."""
        if not self._details or not len(note):
            return None
        found = read_note(note)
        rows = found.get(About.OUTPUT)
        if rows is not None and len(rows) != num_tokens:
            raise WireError("a request was taken over with uneven notes")
        self._details[choice].prompt_rows = found.get(About.PROMPT)
        return rows

    def _replay(
        self,
        choice: int,
        token_ids: Sequence[int],
        rows: LogprobRows | None,
        num_delivered: int,
        finished: FinishReason,
    ) -> None:
        """Consume the output of earlier attempts; only what the client has not seen makes events."""
        text = self._choices[choice]
        unseen, unseen_rows = token_ids, rows
        if self._context.stream and (num_delivered or not token_ids):
            silent, unseen = token_ids[:num_delivered], token_ids[num_delivered:]
            silent_rows = rows and rows.part(0, num_delivered)
            unseen_rows = rows and rows.part(num_delivered, len(token_ids))
            self._consume(choice, silent, FinishReason.RUNNING if unseen else finished, silent_rows)
        if not text.finish_reason:
            data = self._consume(choice, unseen, finished, unseen_rows)
            if data or text.finish_reason != finished:
                self._owed.append(Fed(choice, data, 0, text.finish_reason))
        if text.finish_reason:
            self._num_running -= 1

    # --- bytes

    def _consume(
        self, choice: int, token_ids: Sequence[int], finish_reason: FinishReason, rows: LogprobRows | None
    ) -> bytes:
        """The events that some tokens make: one for all of them, or, where something is counted, those that each would
        make alone: a successor, which replays many at once, has to count the same.
        """
        text = self._choices[choice]
        if not self._one_by_one or len(token_ids) < 2:
            return self._show(choice, text.push(token_ids, finish_reason, rows))
        events = []
        for place in range(len(token_ids)):
            finish = finish_reason if place == len(token_ids) - 1 else FinishReason.RUNNING
            row = rows and rows.part(place, place + 1)
            events.append(self._show(choice, text.push(token_ids[place : place + 1], finish, row)))
            if text.finish_reason:
                break
        return b"".join(events)

    def _show(self, choice: int, shown: str) -> bytes:
        """The event for some text of a choice; of a plain response its piece is kept."""
        text = self._choices[choice]
        finish = text.finish_reason
        if self._is_bare and shown and not finish and self._shown[choice]:  # most tokens
            return self._format.delta(choice, shown)
        if finish in WORDLESS:
            return b""
        if self._details:
            piece = self._details[choice].piece(text, shown)
            if not (piece.parts or piece.tokens or piece.prompt or finish):
                return b""
        elif not (shown or finish):
            return b""
        else:
            parts = [Part(Kind.CONTENT, shown)] if shown else []
            piece = Piece(parts, finish=finish, stop_string=text.stop_string)
        if not self._context.stream:
            self._pieces[choice].append(piece)
            self._num_kept += 1 + len(piece.tokens) * (2 + self._context.num_logprobs)
            return b""
        first, self._shown[choice] = not self._shown[choice], True
        return self._format.event(choice, piece, first=first, usage=self._choice_usage(choice))

    def _close(self, fed: Fed) -> Fed:
        """The end of the response, once every choice has ended."""
        self._over = True
        if any(text.finish_reason == FinishReason.ABORT for text in self._choices):
            return fed._replace(last=True)
        if self._context.stream:
            return fed._replace(data=fed.data + self._format.closing(self._usage()), last=True)
        pieces = [merged(parts) for parts in self._pieces]
        body = self._format.body(pieces, self._usage())
        if len(body) > MAX_ANSWER_BYTES:
            return self._fail(fed, ANSWER_TOO_LARGE)
        return fed._replace(data=body, status=OK, last=True)

    def _fail(self, fed: Fed, error: RequestError) -> Fed:
        """One choice cannot go on: the whole response ends."""
        self._over = True
        if self._context.stream:
            return fed._replace(data=fed.data + self._format.failure(error), last=True)
        return fed._replace(data=error.body(self._context.route), status=error.status, last=True)

    def _usage(self) -> Usage:
        num_output_tokens = sum(text.num_tokens for text in self._choices)
        num_reasoning_tokens = sum(detail.num_reasoning_tokens for detail in self._details)
        return Usage(sum(self._context.num_prompt_tokens), num_output_tokens, sum(self._cached), num_reasoning_tokens)

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
    table = vocabulary.table(skip_special=context.skip_special_tokens, with_marks=with_marks)
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
            stream = TextStream(table, strip_leading_space=prompt in bare)
            choices.append(
                ChoiceText(stream, stops, include_stop=context.include_stop, min_tokens=context.min_tokens, log=log)
            )
            if needs_detail(context):
                details.append(detail(context, log, reporter))
    return choices, details
