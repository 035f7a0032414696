"""Bodies of OpenAI's Responses API as the chat bodies that ask for the same. Tokenizer worker; pure."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Raw

from tokservice.protocol.guide_fields import JsonSchema, ResponseFormat
from tokservice.protocol.reading import refuse_unsupported
from tokservice.protocol.requests import ChatBody, CommonSampling, CustomCall, FunctionCall, Message, ToolCall
from tokservice.protocol.responses_api_requests import (
    ITEM_READERS,
    PRIOR_TEXT_NEUTRAL,
    REASONING_CONFIG_NEUTRAL,
    TEXT_CONFIG_NEUTRAL,
    TYPE_READER,
    CustomToolCallItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputText,
    Item,
    JsonSchemaFormat,
    MessageItem,
    PriorOutputText,
    ReasoningItem,
    ReasoningText,
    ResponsesBody,
    ResultText,
    SummaryText,
    TextConfig,
)
from tokservice.tokenizer.reasoning import with_effort
from tokservice.tokenizer.responses_api_tools import plain_tools, tool_choice, whole_name
from tokservice.tokenizer.sampling import GenerationDefaults
from tokservice.tokenizer.traits import Traits
from tokservice.wire.errors import RequestError

MAX_REPEATED_BYTES = 1024 * 1024  # of the fields that the answer repeats: three times, where it is streamed
MAX_METADATA = 16  # pairs, of these lengths in characters
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512
_OTHER_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}


def chat_body(body: ResponsesBody, traits: Traits) -> ChatBody:
    """The chat request. Raises RequestError (400)."""
    items = None if isinstance(body.input, str) else [_item(place, raw) for place, raw in enumerate(body.input)]
    wants_logprobs = "message.output_text.logprobs" in (body.include or ())  # thoughts are there in any case, in plain
    if body.top_logprobs and not wants_logprobs:
        raise _invalid("'top_logprobs' needs 'include': [\"message.output_text.logprobs\"].", "top_logprobs")
    if wants_logprobs and (traits.tells_thoughts or (body.tools and body.tool_choice != "none")):
        message = "Logprobs are not supported where an answer can have thoughts or tool calls beside its text."
        raise RequestError(message, param="include", code="unsupported")
    return ChatBody(
        **{name: getattr(body, name) for name in CommonSampling.__struct_fields__},
        model=body.model,
        messages=_conversation(body, items),
        continue_final_message=_is_begun(items),
        max_tokens=body.max_output_tokens,
        stream=body.stream,
        tools=None if body.tools is None else plain_tools(body.tools),
        tool_choice=tool_choice(body.tool_choice, body.tools or ()),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body.text),
        logprobs=wants_logprobs,
        top_logprobs=body.top_logprobs if wants_logprobs else None,
        chat_template_kwargs=_variables(body, traits),
        priority=body.priority,
    )


def repeated_fields(body: ResponsesBody, defaults: GenerationDefaults) -> bytes:
    """The fields of the request that its answer repeats: a JSON object in ASCII. Raises RequestError (400)."""
    _check_metadata(body.metadata or {})
    asked = body.text.format if body.text and body.text.format else None
    fields: dict[str, Any] = {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": defaults.temperature if body.temperature is None else body.temperature,
        "text": {"format": _plain(asked) if asked else {"type": "text"}},
        "tool_choice": _plain(body.tool_choice or "auto"),
        "tools": _plain(body.tools or []),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": defaults.top_p if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
    data = json.dumps(fields, separators=(",", ":")).encode()
    if len(data) > MAX_REPEATED_BYTES:
        longest = max(fields, key=lambda name: len(json.dumps(fields[name])))
        raise _invalid(f"'{longest}' is too long for an answer to repeat it.", longest)
    return data


def in_own_words(error: RequestError) -> RequestError:
    """What is wrong with the chat request, by the names that the Responses API has for its fields."""
    message = re.sub(r"^messages\[\d+\]: ", "", error.message)
    for name, other in _OTHER_NAMES.items():
        message = message.replace(f"'{name}'", f"'{other}'")
    return dataclasses.replace(error, message=message, param=_OTHER_NAMES.get(error.param or "", error.param))


# --- the conversation -----------------------------------------------------------------------------------------


def _item(place: int, raw: Raw) -> Item:
    data = bytes(raw)
    try:
        kind = TYPE_READER.read(data).type or "message"
        if kind not in ITEM_READERS:
            raise RequestError(f"items of type '{kind[:50]}' are not supported.", code="unsupported")
        item: Item = ITEM_READERS[kind].read(data)
    except RequestError as error:
        raise dataclasses.replace(error, message=f"input[{place}]: {error.message}", param="input") from error
    return item


def _is_begun(items: list[Item] | None) -> bool:
    """Whether the last item is the beginning of the answer."""
    last = items[-1] if items else None
    return isinstance(last, MessageItem) and last.role == "assistant" and last.status in ("in_progress", "incomplete")


def _conversation(body: ResponsesBody, items: list[Item] | None) -> list[Message]:
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, Message(role="user", content=body.input)]
    if not items:
        raise _invalid("'input' must not be empty.", "input")
    for item in items:
        _add(messages, item)
    return messages


def _add(messages: list[Message], item: Item) -> None:
    """Thoughts, text and tool calls in a row are one message of the assistant."""
    match item:
        case MessageItem(role="assistant"):
            _assistant_message(messages, "content").content = _text(item.content)
        case MessageItem():
            messages.append(Message(role=item.role, content=_text(item.content)))
        case FunctionCallItem():
            function = FunctionCall(whole_name(item.namespace, item.name), item.arguments)
            _add_call(messages, ToolCall(function, id=item.call_id))
        case CustomToolCallItem():
            custom = CustomCall(whole_name(item.namespace, item.name), item.input)
            _add_call(messages, ToolCall(custom=custom, id=item.call_id, type="custom"))
        case FunctionCallOutputItem():
            messages.append(Message(role="tool", content=_text(item.output), tool_call_id=item.call_id))
        case ReasoningItem():
            if thoughts := _text(item.content or item.summary):
                _assistant_message(messages, "reasoning_content", "content", "tool_calls").reasoning_content = thoughts


def _add_call(messages: list[Message], call: ToolCall) -> None:
    message = _assistant_message(messages)
    message.tool_calls = [*(message.tool_calls or ()), call]


def _assistant_message(messages: list[Message], *unset: str) -> Message:
    """The last message, if it is the assistant's and has none of these fields yet; else a new one."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or any(getattr(last, name) is not None for name in unset):
        last = Message(role="assistant")
        messages.append(last)
    return last


def _text(content: str | Iterable[InputText | PriorOutputText | ResultText | SummaryText | ReasoningText]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if isinstance(part, PriorOutputText):
            refuse_unsupported(part, PRIOR_TEXT_NEUTRAL, param="input")
        texts.append(part.text)
    return "".join(texts)


# --- other fields ---------------------------------------------------------------------------------------------


def _response_format(text: TextConfig | None) -> ResponseFormat | None:
    if text is None:
        return None
    refuse_unsupported(text, TEXT_CONFIG_NEUTRAL, param="text")
    if text.format is None:
        return None
    kind = text.format.__struct_config__.tag
    if not isinstance(text.format, JsonSchemaFormat):
        return ResponseFormat(kind)  # type: ignore[arg-type]
    asked = text.format
    schema = Raw(json.dumps(asked.schema, ensure_ascii=False).encode())
    return ResponseFormat("json_schema", JsonSchema(schema, asked.name, asked.description, asked.strict))


def _variables(body: ResponsesBody, traits: Traits) -> dict[str, Any] | None:
    """The template's variables; the effort has the name that templates give it."""
    if body.reasoning is None:
        return body.chat_template_kwargs
    refuse_unsupported(body.reasoning, REASONING_CONFIG_NEUTRAL, param="reasoning")
    return with_effort(body.chat_template_kwargs, body.reasoning.effort, traits, param="reasoning")


def _plain(part: Any) -> Any:
    """Tagged structs as mappings, all of their fields said but those that ask for nothing."""
    if isinstance(part, list):
        return list(map(_plain, part))
    if not isinstance(part, msgspec.Struct):
        return part
    fields = {name: getattr(part, name) for name in part.__struct_fields__}
    said = {name: _plain(value) for name, value in fields.items() if not isinstance(value, Raw)}
    return {"type": part.__struct_config__.tag, **said}


def _check_metadata(metadata: dict[str, str]) -> None:
    fits = all(len(key) <= MAX_METADATA_KEY and len(value) <= MAX_METADATA_VALUE for key, value in metadata.items())
    if len(metadata) > MAX_METADATA or not fits:
        message = (
            f"'metadata' may hold at most {MAX_METADATA} pairs, keys of up to {MAX_METADATA_KEY} and values of up to "
            f"{MAX_METADATA_VALUE} characters."
        )
        raise _invalid(message, "metadata")


def _invalid(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_value")
