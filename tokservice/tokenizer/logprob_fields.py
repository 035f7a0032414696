"""Which log-probabilities a request asks for. Tokenizer worker; pure.

Everywhere -1 means none, 0 those of the tokens themselves, N also those of the N most likely ones.
"""

from __future__ import annotations

from typing import NamedTuple

from tokservice.protocol.requests import ChatBody, CompletionBody, GenerateSampling, Sampling
from tokservice.wire.errors import RequestError

MAX_TOLD = 1 << 19  # entries about tokens of prompts: writing them takes a detokenizer a second, and 100 MB


class LogprobFields(NamedTuple):
    """What is asked for."""

    output: int = -1
    prompt: int = -1  # to be shown apart: prompt_logprobs
    echo: bool = False

    @property
    def engine_prompt(self) -> int:
        """What the engine has to score of the prompt: an echo shows it like the output."""
        return max(self.prompt, self.output if self.echo else -1)

    @property
    def about_prompt(self) -> bool:
        """Whether a response is of use without any output."""
        return self.echo or self.prompt >= 0


def check_told(fields: LogprobFields, num_prompt_tokens: int, n: int, *, tells_ids: bool) -> None:
    """Raise RequestError (400) where an answer would say too much of its prompts, which each choice repeats.

    ``num_prompt_tokens``: of all prompts; ``tells_ids``: of their tokens.
    """
    if not (tells_ids or fields.about_prompt):
        return
    if fields.prompt >= 0:
        param = "prompt_logprobs"
    elif fields.echo:
        param = "echo" if fields.output < 0 else "logprobs"
    else:
        param = "return_token_ids"
    num_entries = 1 + fields.prompt + ((1 + fields.output) if fields.echo else 0)
    told = num_prompt_tokens * n * max(1, num_entries)
    if told > MAX_TOLD:
        message = (
            f"The answer would hold {told} entries about tokens of the prompt, at most {MAX_TOLD} are possible: "
            "ask for fewer prompts, choices or logprobs at once."
        )
        raise RequestError(message, param=param, code="answer_too_large")


def logprob_fields(body: Sampling, *, stream: bool, vocab_size: int) -> LogprobFields:
    """The fields of a body. Raises RequestError (400)."""
    prompt = _count(body.prompt_logprobs, vocab_size)
    if stream and prompt >= 0:
        message = "'prompt_logprobs' is not supported with 'stream': true."
        raise RequestError(message, param="prompt_logprobs", code="unsupported")
    match body:
        case CompletionBody():
            return LogprobFields(_count(body.logprobs, vocab_size), prompt, bool(body.echo))
        case GenerateSampling():
            return LogprobFields(_count(body.logprobs, vocab_size), prompt)
        case ChatBody():
            top = _count(body.top_logprobs, vocab_size)
            if top > 0 and not body.logprobs:
                message = "'top_logprobs' needs 'logprobs': true."
                raise RequestError(message, param="top_logprobs", code="invalid_value")
            return LogprobFields(max(top, 0) if body.logprobs else -1, prompt)
    return LogprobFields(prompt=prompt)


def _count(value: int | None, vocab_size: int) -> int:
    return -1 if value is None else min(value, vocab_size)
