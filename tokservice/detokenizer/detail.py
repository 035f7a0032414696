"""What a response says about a choice beyond its bare text: tokens, logprobs, the prompt, tool calls, thoughts.

Detokenizer worker; pure. Plain text alone never comes here: see ``respond.py`` for that short way.
"""

from __future__ import annotations

from tokservice.detokenizer.choice import ChoiceText
from tokservice.detokenizer.logprob_rows import LogprobRows
from tokservice.detokenizer.message_parser import message_parser
from tokservice.detokenizer.prompt_report import PromptReporter
from tokservice.detokenizer.slices import Pace, Slices
from tokservice.detokenizer.token_log import TokenLog
from tokservice.detokenizer.tool_parsers.parser import MessageParser
from tokservice.protocol.context import Context
from tokservice.protocol.parts import CALLS, Kind, Part, Piece, PromptReport
from tokservice.wire.messages import Route

TOKENS_AT_ONCE = 16  # that a piece tells of, at most


class Detail:
    """Turns the text of one choice, as it comes, into pieces."""

    def __init__(self, log: TokenLog | None, parser: MessageParser | None, reporter: PromptReporter) -> None:
        self.prompt_rows: LogprobRows | None = None  # to be there before the first piece
        self._log = log
        self._parser = parser
        self._reporter = reporter
        self.has_begun = False
        self._prompt: PromptReport | None = None  # for the next piece
        self._num_echoed = 0  # characters of the prompt before the output
        self._calls_tools = False
        self.num_reasoning_tokens = 0  # all up to the end of the thoughts

    def begin(self, pace: Pace) -> Slices[None]:
        """Before any piece: the first one speaks of the prompt."""
        self.has_begun = True
        self._prompt = yield from self._reporter.report(self.prompt_rows, pace)
        self._num_echoed = self._prompt.num_chars if self._prompt else 0

    @property
    def has_many_tokens(self) -> bool:
        """Whether there are more tokens to tell of than one piece may."""
        return self._log is not None and self._log.is_due(TOKENS_AT_ONCE)

    def piece_of_tokens(self) -> Piece:
        """The first of them: more follows."""
        return self._piece([])

    def piece(self, choice: ChoiceText, shown: str) -> Piece:
        """What there is to say after some tokens of the choice, whose text is ``shown``."""
        piece = self._piece(self._parts(shown, ended=bool(choice.finish_reason)))
        piece.finish, piece.stop_string = choice.finish_reason, choice.stop_string
        if any(part.kind == Kind.REASONING for part in piece.parts):
            self.num_reasoning_tokens = choice.num_tokens
        return piece

    def _piece(self, parts: list[Part]) -> Piece:
        prompt, self._prompt = self._prompt, None
        tokens = [] if self._log is None else self._log.take(TOKENS_AT_ONCE)
        if self._num_echoed:
            tokens = [entry._replace(offset=entry.offset + self._num_echoed) for entry in tokens]
        self._calls_tools = self._calls_tools or any(part.kind in CALLS for part in parts)
        return Piece(parts, tokens, prompt, calls_tools=self._calls_tools)

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
    return Detail(log, message_parser(context), reporter)
