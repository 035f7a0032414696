"""What a response says about a choice beyond its bare text: tokens, logprobs, the prompt, tool calls, thoughts.

Detokenizer worker; pure. Plain text alone never comes here: see ``respond.py`` for that short way.
"""

from __future__ import annotations

from collections.abc import Callable

from tokservice.detokenizer.choice import ChoiceText
from tokservice.detokenizer.logprob_rows import LogprobRows
from tokservice.detokenizer.message_parser import message_parser
from tokservice.detokenizer.prompt_report import PromptReporter
from tokservice.detokenizer.token_log import TokenLog
from tokservice.detokenizer.tool_parsers.parser import MessageParser
from tokservice.protocol.context import Context
from tokservice.protocol.parts import CALLS, Kind, Part, Piece, PromptReport, TokenEntry
from tokservice.wire.messages import Route


class Detail:
    """Turns the text of one choice, as it comes, into pieces."""

    def __init__(
        self,
        log: TokenLog | None,
        parser: MessageParser | None,
        report: Callable[[LogprobRows | None], PromptReport | None],
    ) -> None:
        self.prompt_rows: LogprobRows | None = None  # to be there before the first piece
        self._log = log
        self._parser = parser
        self._report = report
        self._has_begun = False
        self._calls_tools = False
        self.num_reasoning_tokens = 0  # all up to the end of the thoughts
        self._num_echoed = 0  # characters of the prompt before the output

    def piece(self, choice: ChoiceText, shown: str) -> Piece:
        """What there is to say after some tokens of the choice, whose text is ``shown``."""
        piece = Piece(self._parts(shown, ended=bool(choice.finish_reason)), finish=choice.finish_reason)
        piece.stop_string = choice.stop_string
        if not self._has_begun:
            self._has_begun = True
            piece.prompt = self._report(self.prompt_rows)
            self._num_echoed = len(piece.prompt.text) if piece.prompt else 0
        if self._log is not None:
            piece.tokens = self._behind_echo(self._log.take() + (self._log.rest() if choice.finish_reason else []))
        self._calls_tools = self._calls_tools or any(part.kind in CALLS for part in piece.parts)
        piece.calls_tools = self._calls_tools
        if any(part.kind == Kind.REASONING for part in piece.parts):
            self.num_reasoning_tokens = choice.num_tokens
        return piece

    def _behind_echo(self, entries: list[TokenEntry]) -> list[TokenEntry]:
        if not self._num_echoed:
            return entries
        return [entry._replace(offset=entry.offset + self._num_echoed) for entry in entries]

    def _parts(self, shown: str, *, ended: bool) -> list[Part]:
        if self._parser is None:
            return [Part(Kind.CONTENT, shown)] if shown else []
        parts = self._parser.push(shown)
        return parts + self._parser.flush() if ended else parts


def needs_log(context: Context) -> bool:
    """Whether something is said about single tokens of the output."""
    return context.num_logprobs >= 0 or context.return_token_ids or context.route == Route.GENERATE


def needs_detail(context: Context) -> bool:
    """Whether a response is more than bare text."""
    return bool(needs_log(context) or context.prompt_ids or context.tool_format or context.reasoning)


def detail(context: Context, log: TokenLog | None, reporter: PromptReporter) -> Detail:
    """The detail of one choice, of the reporter's prompt."""
    return Detail(log, message_parser(context), reporter.report)
