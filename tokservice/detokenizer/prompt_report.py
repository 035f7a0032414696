"""What a response says about its prompt: the echoed text, its tokens and their logprobs. Detokenizer worker; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokservice.detokenizer.logprob_rows import LogprobRows, are_same
from tokservice.detokenizer.slices import Pace, Slices
from tokservice.detokenizer.text_stream import TextStream
from tokservice.detokenizer.token_names import TokenNames
from tokservice.detokenizer.vocabulary import Vocabulary
from tokservice.protocol.context import Context
from tokservice.protocol.growing_json import JsonList, JsonString
from tokservice.protocol.logprobs import COMPLETION_LOGPROBS, PROMPT_LOGPROBS, Logprobs
from tokservice.protocol.parts import PromptReport

AT_ONCE = 128  # tokens to be decoded or listed, or entries about them

Table = Sequence[bytes]


class PromptReporter:
    """What the choices of one prompt say about it: made once, as long as its logprobs are the same."""

    def __init__(self, vocabulary: Vocabulary, context: Context, prompt: int) -> None:
        self._vocabulary = vocabulary
        self._context = context
        self._prompt = prompt
        self._rows: LogprobRows | None = None
        self._report: PromptReport | None = None

    def report(self, rows: LogprobRows | None, pace: Pace) -> Slices[PromptReport | None]:
        """What the first piece of a choice says; None: nothing.

        ``rows``: of the second and all later tokens; None where there are no logprobs.
        """
        if not self._context.prompt_ids:
            return None
        if self._report is None or not are_same(rows, self._rows):
            self._report = yield from self._make(rows, pace)
            self._rows = rows
        return self._report

    def _make(self, rows: LogprobRows | None, pace: Pace) -> Slices[PromptReport]:
        context = self._context
        token_ids = memoryview(context.prompt_ids[self._prompt]).cast("I")
        table = self._vocabulary.table(skip_special=context.skip_special_tokens)
        text = logprobs = told = scores = None
        num_chars = 0
        if context.echo:
            echo, table = yield from self._echo(token_ids, table, pace)
            text, num_chars = JsonString(), len(echo)
            for start in range(0, num_chars, AT_ONCE):
                text.add(echo[start : start + AT_ONCE])
                if pace.is_over(1):
                    yield
        if context.echo and context.num_logprobs >= 0:
            logprobs = Logprobs(COMPLETION_LOGPROBS)
            yield from self._tell(logprobs, token_ids, table, rows, context.num_logprobs, pace)
        if context.return_token_ids:
            told = JsonList()
            for some in _cut(token_ids):
                told.extend(some.tolist())
                if pace.is_over(len(some)):
                    yield
        if context.num_prompt_logprobs >= 0:
            scores = Logprobs(PROMPT_LOGPROBS)
            yield from self._tell(scores, token_ids, table, rows, context.num_prompt_logprobs, pace)
        return PromptReport(text, num_chars, logprobs, told, scores)

    def _echo(self, token_ids: memoryview, table: Table, pace: Pace) -> Slices[tuple[str, Table]]:
        """The text to echo, and the table that makes it."""
        text = self._context.prompt_texts[self._prompt]
        if text is None:
            return (yield from self._decode(token_ids, table, pace)), table
        # The tokenizer may have added special tokens, and the client may have written some.
        for candidate in (self._vocabulary.visible_bytes, self._vocabulary.all_bytes):
            if (yield from self._decode(token_ids, candidate, pace)) == text:
                return text, candidate
        return text, table

    def _decode(self, token_ids: memoryview, table: Table, pace: Pace) -> Slices[str]:
        stream = TextStream(table, strip_leading_space=self._vocabulary.strips_leading_space)
        texts = []
        for some in _cut(token_ids):
            texts.append(stream.push(some))
            if pace.is_over(len(some)):
                yield
        return "".join(texts) + stream.flush()

    def _tell(
        self, told: Logprobs, token_ids: memoryview, table: Table, rows: LogprobRows | None, num_top: int, pace: Pace
    ) -> Slices[None]:
        names = TokenNames(self._vocabulary, table, as_ids=self._context.tokens_as_ids)
        stream = TextStream(table, strip_leading_space=self._vocabulary.strips_leading_space)
        offset = place = 0
        for some in _cut(token_ids, max(1, AT_ONCE // (1 + num_top))):
            entries = []
            for token_id in some:
                row = rows.row(place - 1) if place and rows is not None and place <= len(rows) else None
                entries.append(names.entry(token_id, stream.data(token_id), offset, row, num_top))
                offset += len(stream.push((token_id,)))
                place += 1
            told.extend(entries)
            if pace.is_over(len(entries) * (1 + num_top)):
                yield


def _cut(token_ids: memoryview, size: int = AT_ONCE) -> Iterator[memoryview]:
    return (token_ids[start : start + size] for start in range(0, len(token_ids), size))
