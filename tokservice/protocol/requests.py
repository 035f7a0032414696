"""The bodies that clients send, as strict msgspec types, and the one function that reads them.

Used by the tokenizer workers. Imports no tokenizer and no socket.

Rules that hold for every field:

* an explicit null means the same as leaving the field out;
* a field that no type here names is refused with a 400 that names it;
* a field of type ``Refused`` is known but not supported: it is refused unless it has one of the neutral values
  given beside it, which ask for nothing;
* only the fields of type ``Ignored`` are accepted without effect: they are the client's own bookkeeping.
"""

from __future__ import annotations

import re
import typing
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Raw

from tokservice.wire.errors import RequestError

NULL = Raw(b"null")
MAX_NEUTRAL_BYTES = 64  # a longer value is never neutral, and is not decoded to find out

Ignored = Raw
T = TypeVar("T", bound="Body")


class Neutral:
    """Marks a field that is not supported yet, with the values (beside null) that change nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = (None, *values)


Refused = Annotated[Raw, Neutral()]
RefusedUnlessFalse = Annotated[Raw, Neutral(False)]
RefusedUnlessEmpty = Annotated[Raw, Neutral([], {}, "")]


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of all bodies."""

    model: str | None = None


# --- parts ----------------------------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """``stream_options``"""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Raw, Neutral(False)] = NULL


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """The function of a tool call; arguments as the API's JSON text, or as the object itself."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call that an assistant made earlier in the conversation."""

    function: FunctionCall
    id: str | None = None
    type: typing.Literal["function"] | None = None
    index: int | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation. The refused fields occur as null or empty in copies of our own answers."""

    role: typing.Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Raw]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: RefusedUnlessEmpty = NULL
    annotations: RefusedUnlessEmpty = NULL
    audio: RefusedUnlessEmpty = NULL
    function_call: RefusedUnlessEmpty = NULL


# --- bodies ---------------------------------------------------------------------------------------------------


class GenerationBody(Body, kw_only=True):
    """The fields that completions and chat completions share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None

    user: str | None = None  # bookkeeping of the client, without effect, as are the four below
    metadata: Ignored = NULL
    service_tier: Ignored = NULL
    safety_identifier: Ignored = NULL
    prompt_cache_key: Ignored = NULL
    store: RefusedUnlessFalse = NULL

    prompt_logprobs: Refused = NULL
    response_format: Annotated[Raw, Neutral({"type": "text"})] = NULL
    structured_outputs: Refused = NULL
    guided_json: Refused = NULL
    guided_regex: Refused = NULL
    guided_choice: Refused = NULL
    guided_grammar: Refused = NULL
    bad_words: RefusedUnlessEmpty = NULL
    allowed_token_ids: Refused = NULL
    use_beam_search: RefusedUnlessFalse = NULL
    length_penalty: Annotated[Raw, Neutral(1, 1.0)] = NULL
    spaces_between_special_tokens: Annotated[Raw, Neutral(True)] = NULL
    return_token_ids: RefusedUnlessFalse = NULL
    echo: RefusedUnlessFalse = NULL


class CompletionBody(GenerationBody, kw_only=True):
    """``POST /v1/completions``"""

    prompt: str | list[int | str | list[int]]
    best_of: int | None = None
    logprobs: RefusedUnlessFalse = NULL
    suffix: Annotated[Raw, Neutral("")] = NULL


class ChatBody(GenerationBody, kw_only=True):
    """``POST /v1/chat/completions``"""

    messages: list[Message]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    chat_template: Refused = NULL  # a template is code: it comes from the model's folder alone
    logprobs: RefusedUnlessFalse = NULL
    top_logprobs: Annotated[Raw, Neutral(0)] = NULL
    tools: RefusedUnlessEmpty = NULL
    tool_choice: Annotated[Raw, Neutral("none")] = NULL
    parallel_tool_calls: Annotated[Raw, Neutral(True)] = NULL
    functions: RefusedUnlessEmpty = NULL
    function_call: Annotated[Raw, Neutral("none")] = NULL
    documents: RefusedUnlessEmpty = NULL
    reasoning_effort: Refused = NULL
    verbosity: Refused = NULL
    modalities: Annotated[Raw, Neutral(["text"])] = NULL
    audio: Refused = NULL
    prediction: Refused = NULL
    web_search_options: Refused = NULL


class TokenizeBody(Body, kw_only=True):
    """``POST /tokenize``: a text, or a conversation."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: RefusedUnlessEmpty = NULL
    chat_template: Refused = NULL


class DetokenizeBody(Body, kw_only=True):
    """``POST /detokenize``"""

    tokens: list[int]


# --- reading --------------------------------------------------------------------------------------------------


class Reader(typing.Generic[T]):
    """Reads bodies of one type."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._neutral = _neutral_fields(kind)

    def read(self, body: bytes) -> T:
        """The validated body. Raises RequestError (400), which names the field."""
        try:
            request = self._decoder.decode(body)
            refuse_unsupported(request, self._neutral)
        except msgspec.ValidationError as error:
            raise _explained(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"The body is not valid JSON: {error}", code="invalid_json") from error
        except RecursionError as error:
            raise RequestError("The body is nested too deeply.", code="invalid_json") from error
        return request


def refuse_unsupported(part: msgspec.Struct, neutral: dict[str, tuple[Any, ...]], param: str | None = None) -> None:
    """Raise RequestError if a field that is not supported asks for something."""
    for name, values in neutral.items():
        raw = getattr(part, name)
        if raw is NULL:
            continue
        if not _is_neutral(raw, values):
            raise RequestError(f"'{name}' is not supported by this server.", param=param or name, code="unsupported")


def _is_neutral(raw: Raw, values: tuple[Any, ...]) -> bool:
    if len(bytes(raw)) > MAX_NEUTRAL_BYTES:
        return False
    value = msgspec.json.decode(raw)
    return any(type(value) is type(neutral) and value == neutral for neutral in values)  # 0 is not False


def _neutral_fields(kind: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    """Name -> neutral values of the fields of a type that are not supported."""
    fields = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, Neutral):
                fields[name] = note.values
    return fields


MESSAGE_NEUTRAL = _neutral_fields(Message)
STREAM_OPTIONS_NEUTRAL = _neutral_fields(StreamOptions)

_PATH = re.compile(r"`\$(?:\.(\w+))?")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*?)`", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(\w+)`")


def _explained(problem: str) -> RequestError:
    """msgspec's complaint with the top-level field as ``param``; the message keeps the whole path."""
    path = _PATH.search(problem)
    param = path.group(1) if path else None
    if unknown := _UNKNOWN.match(problem):
        name = unknown.group(1)[:100]
        return RequestError(f"Unknown field '{name}'.", param=param or name, code="unknown_field")
    if missing := _MISSING.match(problem):
        param = param or missing.group(1)
        return RequestError(f"'{missing.group(1)}' is required.", param=param, code="missing_field")
    return RequestError(f"Invalid value: {problem[:500]}.", param=param, code="invalid_value")
