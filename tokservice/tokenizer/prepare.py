"""Raw JSON body in; token ids, sampling parameters and context out. The pure core of a tokenizer worker.

No socket, no clock. Whatever is wrong with a body ends in a RequestError, never in another exception.
"""

from __future__ import annotations

import dataclasses
import secrets
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from tokservice.protocol.anthropic_requests import CountTokensBody, MessagesBody
from tokservice.protocol.reading import Reader
from tokservice.protocol.requests import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    GenerateSampling,
    Message,
    Sampling,
    TokenizeBody,
)
from tokservice.protocol.responses_api_requests import ResponsesBody
from tokservice.runtime.config import TokenizerConfig
from tokservice.tokenizer import anthropic_chat, chat_template, conversation, responses_api_chat
from tokservice.tokenizer.answer_or_calls import answer_or_calls
from tokservice.tokenizer.bad_words import bad_words_ids
from tokservice.tokenizer.encode import Encoder
from tokservice.tokenizer.guides import Guide, guide_of
from tokservice.tokenizer.json_guard import check_depth
from tokservice.tokenizer.logprob_fields import check_told
from tokservice.tokenizer.output import Extras, Output, output_of
from tokservice.tokenizer.prepared import Answer, Prepared, finished
from tokservice.tokenizer.prompts import Prompt, check_length, check_token_ids, num_tokens_to_keep, prompt_list
from tokservice.tokenizer.reasoning import reasoning_of, with_effort
from tokservice.tokenizer.responses_api_tools import namespaces
from tokservice.tokenizer.sampling import load_defaults, sampling_params
from tokservice.tokenizer.tool_use import ToolUse, check_tools, format_of, plain_tools, tool_use
from tokservice.tokenizer.traits import Traits
from tokservice.wire.codec import MAX_ANSWER_BYTES
from tokservice.wire.errors import ANSWER_TOO_LARGE, NOT_READY, RequestError
from tokservice.wire.messages import Buffer, EngineLimits, Route

__all__ = ["Answer", "Prepared", "Preparer"]

_NAMES = {  # the field that holds the prompt, and the beginning of the response's id
    Route.COMPLETIONS: ("prompt", "cmpl-"),
    Route.CHAT_COMPLETIONS: ("messages", "chatcmpl-"),
    Route.GENERATE: ("prompt_token_ids", "gen-"),
    Route.MESSAGES: ("messages", "msg_"),
    Route.RESPONSES: ("input", "resp_"),
}
MAX_LISTED_TOKENS = 1 << 21  # by /tokenize, and taken by /detokenize: more than any context
DEFAULT_MAX_TOKENS = 16  # of completions; chat completions may use what the prompt leaves of the context


class Preparer:
    """Prepares requests for one model; used by one thread."""

    def __init__(
        self,
        *,
        model_dir: Path,
        model_name: str,
        chat_template_file: str,
        settings: TokenizerConfig,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "",
        randbits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        """Load tokenizer and template of a model's folder. The two parsers: see ModelConfig. ``randbits(k)``: an
        integer below 2**k, for response ids and for the seeds that clients leave out. Raises StartupError.
        """
        self._model_name = model_name
        self._settings = settings
        self._randbits = randbits
        self._encoder = Encoder(model_dir, settings, randbits)
        self._templates = chat_template.load(model_dir, chat_template_file, self._encoder.own_tokens)
        self._traits = _traits(self._templates, reasoning_parser)
        self._tool_format = _tool_format(self._templates) if tool_call_parser == "auto" else tool_call_parser
        self._reasoning_parser = reasoning_parser
        self._defaults = load_defaults(model_dir)
        self._completions = Reader(CompletionBody)
        self._chats = Reader(ChatBody)
        self._generates = Reader(GenerateBody)
        self._tokenizes = Reader(TokenizeBody)
        self._detokenizes = Reader(DetokenizeBody)
        self._messages = Reader(MessagesBody)
        self._token_counts = Reader(CountTokensBody)
        self._responses = Reader(ResponsesBody)
        self._limits: EngineLimits | None = None

    def set_limits(self, limits: EngineLimits) -> None:
        """What the engine can take. A sequence never needs more tokens than its KV cache has."""
        capacity = limits.kv_cache_tokens or limits.max_model_len
        self._limits = dataclasses.replace(limits, max_model_len=min(limits.max_model_len, capacity))

    def shadow_check(self) -> bool | None:
        """Compare a text of late with the reference tokenizer, if chance chose one. See ShadowCheck."""
        check = self._encoder.shadow_check
        return None if check is None else check.run()

    def bound_memory(self) -> None:
        """Between two requests, once in a while. See CacheBound."""
        self._encoder.cache_bound.check()

    def prepare(self, route: Route, body: Sequence[Buffer], now: float) -> Prepared | Answer:
        """Prepare one request. ``body``: the raw body in pieces; ``now``: unix seconds.

        Raises RequestError for whatever is wrong with the request, and nothing else.
        """
        if self._limits is None:
            raise NOT_READY
        data = b"".join(body)
        check_depth(data, self._settings.max_json_depth)
        match route:
            case Route.COMPLETIONS:
                return self._complete(self._completions.read(data), now, self._limits)
            case Route.CHAT_COMPLETIONS:
                return self._chat(self._chats.read(data), now, self._limits)
            case Route.GENERATE:
                return self._generate_ids(self._generates.read(data), now, self._limits)
            case Route.TOKENIZE:
                return self._tokenize(self._tokenizes.read(data), now, self._limits)
            case Route.DETOKENIZE:
                return self._detokenize(self._detokenizes.read(data), self._limits)
            case Route.MESSAGES:
                return self._message(self._messages.read(data), now, self._limits)
            case Route.COUNT_TOKENS:
                return self._count_tokens(self._token_counts.read(data), now, self._limits)
            case Route.RESPONSES:
                return self._respond(self._responses.read(data), now, self._limits)

    # --- routes -----------------------------------------------------------------------------------------------

    def _complete(self, body: CompletionBody, now: float, limits: EngineLimits) -> Prepared:
        self._check_model(body.model)
        if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
            raise RequestError("'best_of' must equal 'n'.", param="best_of", code="invalid_value")
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        return self._generate(
            Route.COMPLETIONS,
            body,
            prompt_list(body.prompt, "prompt"),
            max_tokens=max_tokens,
            add_special_tokens=body.add_special_tokens is not False,
            output=output_of(body, body, limits),
            guide=guide_of(body),
            priority=body.priority,
            now=now,
            limits=limits,
        )

    def _chat(
        self,
        body: ChatBody,
        now: float,
        limits: EngineLimits,
        route: Route = Route.CHAT_COMPLETIONS,
        extras: Extras | None = None,
    ) -> Prepared:
        self._check_model(body.model)
        tools = tool_use(body, self._tool_format)
        guide = guide_of(body)
        guide = answer_or_calls(guide, tools, self._encoder.added_id) if guide else tools.guide
        variables = with_effort(
            body.chat_template_kwargs, body.reasoning_effort, self._traits, param="reasoning_effort"
        )
        text = self._render(body.messages, body, now, tools, variables)
        begun = conversation.text_of(body.messages[-1]) if body.continue_final_message else ""
        output = dataclasses.replace(
            output_of(body, body, limits),
            tools=tools,
            reasoning=reasoning_of(self._reasoning_parser, text, begun, is_guided=guide is not None),
            extras=extras or Extras(),
        )
        return self._generate(
            route,
            body,
            [text],
            max_tokens=_chat_max_tokens(body),
            add_special_tokens=bool(body.add_special_tokens),
            output=output,
            guide=guide,
            priority=body.priority,
            now=now,
            limits=limits,
        )

    def _message(self, body: MessagesBody, now: float, limits: EngineLimits) -> Prepared:
        edits = orjson.dumps(anthropic_chat.applied_edits(body))
        extras = Extras(more_fields=edits, omits_thoughts=anthropic_chat.omits_thoughts(body))
        try:
            return self._chat(anthropic_chat.chat_body(body, self._traits), now, limits, Route.MESSAGES, extras)
        except RequestError as error:
            raise anthropic_chat.in_own_words(error) from error

    def _count_tokens(self, body: CountTokensBody, now: float, limits: EngineLimits) -> Answer:
        num_tokens = len(self._token_ids_of(anthropic_chat.tokenize_body(body, self._traits), now, limits))
        counts: dict[str, Any] = {"input_tokens": num_tokens}
        if body.context_management is not None:  # nothing of the conversation is cleared
            counts["context_management"] = {"original_input_tokens": num_tokens}
        return Answer(orjson.dumps(counts))

    def _respond(self, body: ResponsesBody, now: float, limits: EngineLimits) -> Prepared:
        repeated = responses_api_chat.repeated_fields(body, self._defaults)
        extras = Extras(more_fields=repeated, namespaces=namespaces(body.tools or ()))
        try:
            return self._chat(responses_api_chat.chat_body(body, self._traits), now, limits, Route.RESPONSES, extras)
        except RequestError as error:
            raise responses_api_chat.in_own_words(error) from error

    def _generate_ids(self, body: GenerateBody, now: float, limits: EngineLimits) -> Prepared:
        self._check_model(body.model)
        sampling = body.sampling_params or GenerateSampling()
        return self._generate(
            Route.GENERATE,
            sampling,
            prompt_list(body.prompt_token_ids, "prompt_token_ids"),
            max_tokens=DEFAULT_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens,
            add_special_tokens=False,
            output=output_of(body, sampling, limits),
            guide=guide_of(sampling),
            priority=body.priority,
            now=now,
            limits=limits,
        )

    def _tokenize(self, body: TokenizeBody, now: float, limits: EngineLimits) -> Answer:
        ids = self._token_ids_of(body, now, limits)
        _check_listed("prompt" if body.messages is None else "messages", len(ids))
        token_strs = self._encoder.token_strings(ids) if body.return_token_strs else None
        counts = {"count": len(ids), "max_model_len": limits.max_model_len}
        return _answer({**counts, "tokens": ids.tolist(), "token_strs": token_strs})

    def _token_ids_of(self, body: TokenizeBody, now: float, limits: EngineLimits) -> array[int]:
        """Of a text or a conversation."""
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            message = "Exactly one of 'prompt' and 'messages' is required."
            raise RequestError(message, param="prompt", code="invalid_value")
        if body.prompt is not None:
            text, param = body.prompt, "prompt"
            add_special_tokens = body.add_special_tokens is not False
        else:
            check_tools(body.tools or [])
            tools = ToolUse(shown=plain_tools(body.tools)) if body.tools else ToolUse()
            text, param = self._render(body.messages or [], body, now, tools, body.chat_template_kwargs), "messages"
            add_special_tokens = bool(body.add_special_tokens)
        return self._encoder.encode(text, add_special_tokens=add_special_tokens, limits=limits, param=param)

    def _detokenize(self, body: DetokenizeBody, limits: EngineLimits) -> Answer:
        self._check_model(body.model)
        _check_listed("tokens", len(body.tokens))
        check_token_ids("tokens", body.tokens, limits.vocab_size)
        return _answer({"prompt": self._encoder.decode(body.tokens)})

    # --- steps ------------------------------------------------------------------------------------------------

    def _generate(
        self,
        route: Route,
        body: Sampling,
        prompts: list[Prompt],
        *,
        max_tokens: int | None,  # None: what the prompt leaves of the context
        add_special_tokens: bool,
        output: Output,
        guide: Guide | None,
        priority: int | None,
        now: float,
        limits: EngineLimits,
    ) -> Prepared:
        """The common way of all kinds of generation: all that is cheap to check comes before encoding."""
        sampling = sampling_params(
            body,
            max_tokens=limits.max_model_len if max_tokens is None else max_tokens,
            logprobs=output.logprobs,
            guide=guide,
            bad_words_ids=bad_words_ids(body.bad_words, self._encoder, limits),
            priority=priority or 0,
            defaults=self._defaults,
            limits=limits,
            seed=self._randbits(63),
        )
        self._check_fan_out(len(prompts), sampling.n)
        keep = num_tokens_to_keep(body.truncate_prompt_tokens, max_tokens or 1, limits.max_model_len)
        param, prefix = _NAMES[route]
        token_ids = [self._token_ids(prompt, param, add_special_tokens, keep, limits) for prompt in prompts]
        check_told(output.logprobs, sum(map(len, token_ids)), sampling.n, tells_ids=output.return_token_ids)
        return finished(
            route,
            output,
            token_ids=token_ids,
            prompt_texts=tuple(str(prompt) if isinstance(prompt, str) and keep is None else None for prompt in prompts),
            num_pretokenized=sum(not isinstance(prompt, str) for prompt in prompts),
            bare_prompts=tuple(i for i, ids in enumerate(token_ids) if self._encoder.is_bare(ids)),
            sampling=sampling,
            max_model_len=limits.max_model_len,
            model=self._model_name,
            response_id=f"{prefix}{self._randbits(128):032x}",
            created=int(now),
        )

    def _token_ids(
        self, prompt: Prompt, param: str, add_special_tokens: bool, keep: int | None, limits: EngineLimits
    ) -> Sequence[int]:
        """Token ids of one prompt, its last ``keep`` ones, known to fit."""
        token_ids: Sequence[int]
        if isinstance(prompt, str):
            token_ids = self._encoder.encode(
                prompt, add_special_tokens=add_special_tokens, limits=limits, param=param, guarded=keep is None
            )
        else:
            check_token_ids(param, prompt, limits.vocab_size)
            token_ids = prompt
        if keep is not None:
            token_ids = token_ids[-keep:]
        check_length(token_ids, limits.max_model_len, param)
        return token_ids

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._model_name:
            message = f"The model '{model[:200]}' does not exist; this server serves '{self._model_name}'."
            raise RequestError(message, status=404, param="model", code="model_not_found")

    def _check_fan_out(self, num_prompts: int, n: int) -> None:
        max_choices = self._settings.max_choices
        if num_prompts * n > max_choices:
            message = f"The number of prompts times 'n' must be at most {max_choices}."
            raise RequestError(message, param="n" if n > 1 else "prompt", code="too_many_choices")

    def _render(
        self,
        messages: list[Message],
        body: ChatBody | TokenizeBody,
        now: float,
        tools: ToolUse,
        variables: dict[str, Any] | None,
    ) -> str:
        if self._templates is None:
            message = "This model has no chat template: use /v1/completions."
            raise RequestError(message, param="messages", code="no_chat_template")
        text = conversation.render(
            self._templates.of(tools.shown),
            messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=variables,
            now=now,
            mark=f"\ue000{self._randbits(128):032x}\ue000",
            tools=tools.shown,
        )
        return self._encoder.own_tokens.rendered(text) if self._encoder.own_tokens else text


def _traits(templates: chat_template.ChatTemplates | None, reasoning_parser: str) -> Traits:
    if templates is None:
        return Traits()
    return Traits(templates.default.variables | templates.for_tools.variables, bool(reasoning_parser))


def _tool_format(templates: chat_template.ChatTemplates | None) -> str:
    """Of tool calls: the template's, or that of the words with which it is told of tools."""
    template = templates and templates.for_tools
    return format_of(template.source if template and template.shows.tools else "")


def _check_listed(param: str, num_tokens: int) -> None:
    if num_tokens > MAX_LISTED_TOKENS:
        message = f"'{param}' has {num_tokens} tokens; at most {MAX_LISTED_TOKENS} can be listed at once."
        raise RequestError(message, param=param, code="answer_too_large")


def _answer(value: dict[str, Any]) -> Answer:
    body = orjson.dumps(value)
    if len(body) > MAX_ANSWER_BYTES:
        raise ANSWER_TOO_LARGE
    return Answer(body)


def _chat_max_tokens(body: ChatBody) -> int | None:
    """``max_completion_tokens``, or its older name."""
    if body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        message = "'max_tokens' and 'max_completion_tokens' mean the same, but differ."
        raise RequestError(message, param="max_completion_tokens", code="invalid_value")
    return body.max_completion_tokens
