"""What a response says about its prompt: the echoed text, its tokens and their logprobs. Detokenizer worker; pure."""

from __future__ import annotations

from collections.abc import Sequence

from tokservice.detokenizer.logprob_rows import LogprobRows
from tokservice.detokenizer.text_stream import TextStream
from tokservice.detokenizer.token_names import TokenNames
from tokservice.detokenizer.vocabulary import Vocabulary
from tokservice.protocol.context import Context
from tokservice.protocol.parts import PromptReport, TokenEntry

Table = Sequence[bytes]


class PromptReporter:
    """What the choices of one prompt say about it: made once, as long as its logprobs are the same."""

    def __init__(self, vocabulary: Vocabulary, context: Context, prompt: int) -> None:
        self._of = vocabulary, context, prompt
        self._rows: LogprobRows | None = None
        self._report: PromptReport | None = None

    def report(self, rows: LogprobRows | None) -> PromptReport | None:
        """See ``report_prompt``."""
        if self._report is None or rows != self._rows:
            self._rows, self._report = rows, report_prompt(*self._of, rows)
        return self._report


def report_prompt(
    vocabulary: Vocabulary, context: Context, prompt: int, rows: LogprobRows | None
) -> PromptReport | None:
    """What the first piece of a choice of this prompt says about it; None: nothing.

    ``rows``: of the second and all later tokens; None where there are no logprobs.
    """
    if not context.prompt_ids:
        return None
    token_ids = memoryview(context.prompt_ids[prompt]).cast("I")
    table = vocabulary.table(skip_special=context.skip_special_tokens)
    text = context.prompt_texts[prompt] if context.echo else None
    if text is None:
        text = _decoded(vocabulary, table, token_ids)
    else:  # the tokenizer may have added special tokens, and the client may have written some
        candidates = (vocabulary.visible_bytes, vocabulary.all_bytes)
        table = next((one for one in candidates if _decoded(vocabulary, one, token_ids) == text), table)

    def entries(num_top: int) -> list[TokenEntry]:
        return _entries(vocabulary, context, table, token_ids, rows, num_top)

    return PromptReport(
        token_ids=token_ids.tolist() if context.return_token_ids else None,
        text=text if context.echo else "",
        entries=entries(context.num_logprobs) if context.echo and context.num_logprobs >= 0 else (),
        scores=entries(context.num_prompt_logprobs) if context.num_prompt_logprobs >= 0 else None,
    )


def _entries(
    vocabulary: Vocabulary,
    context: Context,
    table: Table,
    token_ids: Sequence[int],
    rows: LogprobRows | None,
    num_top: int,
) -> list[TokenEntry]:
    names = TokenNames(vocabulary, table, as_ids=context.tokens_as_ids)
    stream = TextStream(table, strip_leading_space=vocabulary.strips_leading_space)
    offset = 0
    entries = []
    for place, token_id in enumerate(token_ids):
        row = rows.row(place - 1) if place and rows is not None and place <= len(rows) else None
        entries.append(names.entry(token_id, stream.data(token_id), offset, row, num_top))
        offset += len(stream.push((token_id,)))
    return entries


def _decoded(vocabulary: Vocabulary, table: Table, token_ids: Sequence[int]) -> str:
    stream = TextStream(table, strip_leading_space=vocabulary.strips_leading_space)
    return stream.push(token_ids) + stream.flush()
