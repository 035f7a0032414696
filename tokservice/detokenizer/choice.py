"""One choice: its token ids in, the text that a client may see out. Detokenizer worker; pure.

What has been shown is a function of the ids consumed, never of how they were grouped or of time, so a choice that
is replayed elsewhere goes on exactly where it stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from tokservice.detokenizer.logprob_rows import LogprobRows
from tokservice.detokenizer.stop import StopMatcher, StopStrings
from tokservice.detokenizer.text_stream import TextStream
from tokservice.detokenizer.token_log import TokenLog
from tokservice.wire.messages import FinishReason

WORDLESS = frozenset({FinishReason.ABORT, FinishReason.ERROR, FinishReason.GUIDE_FAILED})  # ends that show no text


class ChoiceText:
    """The text of one choice, and how it ended."""

    __slots__ = (
        "_include_stop",
        "_log",
        "_matcher",
        "_min_tokens",
        "_stop_table",
        "_stream",
        "finish_reason",
        "num_tokens",
        "stop_string",
    )

    def __init__(
        self,
        stream: TextStream,
        stops: StopStrings | None,
        *,
        include_stop: bool,
        min_tokens: int,
        stop_table: Sequence[bytes] | None = None,
        log: TokenLog | None = None,
    ) -> None:
        """``stop_table``: id -> bytes where stop strings are looked for; None: that of the stream."""
        self._stream = stream
        self._stop_table = stream.table if stop_table is None else stop_table
        self._matcher = StopMatcher(stops) if stops is not None else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens  # stop strings are not looked for in the text of so many tokens
        self._log = log
        self.num_tokens = 0  # consumed
        self.stop_string = ""  # that ended it
        self.finish_reason = FinishReason.RUNNING

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason, rows: LogprobRows | None = None) -> str:
        """Consume tokens, up to a stop string where one ends among them, and return the text to show.

        ``rows``: their logprobs, where the log takes any.
        The last token of a STOP is an eos or stop token: its text is shown only with ``include_stop``. But if
        it completes a stop string, that one ends the text, as it would anywhere else. ABORT and failures end the
        choice without a word.
        """
        if finish_reason in WORDLESS:
            self.finish_reason = finish_reason
            return ""
        if self._log is not None:
            self._log.begin(rows)
        hidden: Sequence[int] = ()
        if finish_reason == FinishReason.STOP and not self._include_stop:
            token_ids, hidden = token_ids[:-1], token_ids[-1:]
        text = self._push(token_ids)
        if hidden and not self.finish_reason:
            text += self._push_hidden(hidden)
        if finish_reason and not self.finish_reason:
            text += self._flush()
            self.finish_reason = self.finish_reason or finish_reason
        if self.finish_reason and self._log is not None:
            self._log.end()
        return text

    def _push(self, token_ids: Sequence[int]) -> str:
        if self._matcher is None and self._log is None:
            self.num_tokens += len(token_ids)
            return self._stream.push(token_ids)
        shown = []
        for token_id in token_ids:  # one by one: the tokens after a stop string are not consumed
            self.num_tokens += 1
            if self.num_tokens > self._min_tokens:
                self._stream.table = self._stop_table
            text = self._next(token_id)
            shown.append(self._match(text) if self.num_tokens > self._min_tokens else self._count(text, text))
            if self.finish_reason:
                break
        return "".join(shown)

    def _next(self, token_id: int) -> str:
        """The text that a token completes."""
        if self._log is None:
            return self._stream.push((token_id,))
        data = self._stream.data(token_id)
        text = self._stream.push((token_id,))
        self._log.add(token_id, data, len(text), is_unfinished=bool(self._stream.pending))
        return text

    def _push_hidden(self, token_ids: Sequence[int]) -> str:
        before = copy(self._stream), copy(self._matcher)
        log = self._log
        counts = (log.num_decoded, log.num_shown) if log is not None else (0, 0)
        text = self._push(token_ids)
        if self.finish_reason:
            return text
        self._stream, self._matcher = before
        if log is not None:
            log.num_decoded, log.num_shown = counts
            log.hide_last()
        return ""

    def _match(self, text: str) -> str:
        if self._matcher is None:
            return self._count(text, text)
        shown, is_cut = self._matcher.push(text, include_stop=self._include_stop)
        if is_cut:
            self.finish_reason, self.stop_string = FinishReason.STOP, self._matcher.matched
        return self._count(text, shown)

    def _count(self, decoded: str, shown: str) -> str:
        if self._log is not None:
            self._log.num_decoded += len(decoded)
            self._log.num_shown += len(shown)
        return shown

    def _flush(self) -> str:
        """What was held back: an unfinished character, the beginning of a stop string."""
        text = self._match(self._stream.flush())
        if self.finish_reason or self._matcher is None:
            return text
        return text + self._count("", self._matcher.flush())
