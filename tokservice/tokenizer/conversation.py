"""The messages of a chat request as a template wants them, and the prompt's text. Tokenizer worker; pure.

Rules where the APIs of models differ: text parts are joined without a separator; null content is an empty text; the
role "developer" becomes "system" unless the template knows it; the arguments of tool calls become a mapping, or JSON
text, whichever the template needs, and their ids become short ones where it takes no others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokservice.protocol.reading import refuse_unsupported
from tokservice.protocol.requests import MESSAGE_NEUTRAL, Message, ToolCall
from tokservice.tokenizer.chat_template import ChatTemplate
from tokservice.tokenizer.custom_tools import arguments_of
from tokservice.tokenizer.fitted import fitted
from tokservice.tokenizer.json_guard import check_depth
from tokservice.tokenizer.template_probes import SHORT_ID_CHARS, Shown
from tokservice.wire.errors import RequestError

MAX_ARGUMENTS_DEPTH = 64
TEXT_PART_FIELDS = {"type", "text", "cache_control", "prompt_cache_breakpoint"}  # the last two are the client's own
NO_ARGUMENTS = ("", "null")  # models and clients write so that there are none


def render(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    variables: Mapping[str, Any] | None,
    now: float,
    mark: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The prompt's text. ``mark`` is a text that no client can guess. Raises RequestError (400)."""
    if not messages:
        raise _invalid("'messages' must not be empty.")
    conversation = [_plain(place, message, template.shows) for place, message in enumerate(messages)]
    conversation, tools = fitted(conversation, tools, template.shows)
    if not continue_final_message:
        add_generation_prompt = add_generation_prompt is None or add_generation_prompt
        return template.render(
            conversation, now=now, add_generation_prompt=add_generation_prompt, variables=variables, tools=tools
        )

    if add_generation_prompt:
        message = "'continue_final_message' and 'add_generation_prompt' exclude each other."
        raise RequestError(message, param="continue_final_message", code="invalid_value")
    if messages[-1].role != "assistant":
        message = "'continue_final_message' needs a final message of the assistant."
        raise RequestError(message, param="continue_final_message", code="invalid_value")
    if messages[-1].tool_calls:  # they end the message: what follows its text would be lost
        message = "The final message calls tools, so it cannot be continued."
        raise RequestError(message, param="continue_final_message", code="invalid_value")
    conversation[-1]["content"] += mark  # keeps the place, and blanks that the template would trim
    text = template.render(conversation, now=now, add_generation_prompt=False, variables=variables, tools=tools)
    prompt, found, _ = text.rpartition(mark)
    if not found:
        message = "The chat template does not show the final message, so it cannot be continued."
        raise RequestError(message, param="continue_final_message", code="invalid_value")
    return prompt


def text_of(message: Message) -> str:
    """The content of a message that ``render`` has taken."""
    return _text(0, message.content)


def _plain(place: int, message: Message, shows: Shown) -> dict[str, Any]:
    refuse_unsupported(message, MESSAGE_NEUTRAL, param="messages")
    role = "system" if message.role == "developer" and not shows.developer else message.role
    plain: dict[str, Any] = {"role": role, "content": _text(place, message.content)}
    thoughts = message.reasoning if message.reasoning_content is None else message.reasoning_content
    called = _call_id(message.tool_call_id, shows) if message.role == "tool" else message.tool_call_id
    optional = {"name": message.name, "tool_call_id": called, "reasoning_content": thoughts}
    plain |= {name: value for name, value in optional.items() if value is not None}
    if message.tool_calls:
        plain["content"] = plain["content"] or shows.silence
        plain["tool_calls"] = [_tool_call(place, call, shows) for call in message.tool_calls]
    return plain


def _text(place: int, content: str | list[dict[str, msgspec.Raw]] | None) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content or ():
        kind, text = _string(part.get("type")), _string(part.get("text"))
        if kind != "text":
            raise _invalid(f"messages[{place}]: content parts of type {str(kind)[:50]!r} are not supported.")
        if text is None:
            raise _invalid(f"messages[{place}]: a text part needs a 'text' that is a string.")
        if unknown := part.keys() - TEXT_PART_FIELDS:
            raise _invalid(f"messages[{place}]: unknown field {min(unknown)[:50]!r} of a text part.")
        texts.append(text)
    return "".join(texts)


def _string(raw: msgspec.Raw | None) -> str | None:
    try:
        return None if raw is None else msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _tool_call(place: int, call: ToolCall, shows: Shown) -> dict[str, Any]:
    name, arguments = _named_arguments(place, call)
    if isinstance(arguments, str) and arguments.strip() in NO_ARGUMENTS:
        arguments = {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    mapping = _mapping(arguments) if isinstance(arguments, str) else arguments
    function = {"name": name, "arguments": text if shows.arguments_as_text else mapping}
    plain: dict[str, Any] = {"type": "function", "function": function}
    call_id = _call_id(call.id, shows)
    return plain if call_id is None else {"id": call_id, **plain}


def _call_id(given: str | None, shows: Shown) -> str | None:
    """As the template takes it: ids come from whatever server a conversation began at, or from none."""
    if not shows.short_ids or (given and len(given) == SHORT_ID_CHARS and given.isalnum()):
        return given
    return hashlib.blake2b((given or "").encode()).hexdigest()[:SHORT_ID_CHARS]


def _named_arguments(place: int, call: ToolCall) -> tuple[str, str | dict[str, Any]]:
    """The name of the tool that was called, and the arguments that a function would have had."""
    kind = call.type or "function"
    if (call.function is None) == (call.custom is None) or getattr(call, kind) is None:
        raise _invalid(f"messages[{place}]: a tool call of type '{kind}' needs '{kind}', and nothing in its place.")
    if call.custom is not None:
        return call.custom.name, arguments_of(call.custom.input)
    assert call.function is not None
    return call.function.name, call.function.arguments or {}


def _mapping(arguments: str) -> dict[str, Any]:
    """Arguments as the API carries them: a JSON object in a string. What models wrote otherwise is shown as a text: if
    it were refused, a conversation could not go on from there.
    """
    data = arguments.encode()
    try:
        check_depth(data, MAX_ARGUMENTS_DEPTH)
        return msgspec.json.decode(data, type=dict[str, Any])
    except (RequestError, msgspec.DecodeError, UnicodeDecodeError):
        return arguments_of(arguments)


def _invalid(message: str) -> RequestError:
    return RequestError(message, param="messages", code="invalid_value")
