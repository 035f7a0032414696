"""The API's description (OpenAPI 3.1), from the very types that read bodies and those that say what is written.

The launcher writes it once; imports no tokenizer and no socket.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec

from tokservice.protocol import (
    answers,
    anthropic_answers,
    anthropic_requests,
    requests,
    responses_api_answers,
    responses_api_requests,
)
from tokservice.protocol.described import UNTYPED, described
from tokservice.wire.errors import SSE_DONE

Document = dict[str, Any]

JSON = "application/json"
EVENTS = "text/event-stream"
DONE = SSE_DONE.decode().removeprefix("data: ").rstrip()
SCHEMAS = "#/components/schemas/{name}"
DESCRIPTION = """\
A field that is not listed is refused with a 400 that names it; null means the same as leaving a field out. \
With "stream": true the answer is server-sent events; the schemas given here are those of one event, by its fields."""
POST_ERRORS = (400, 401, 404, 405, 408, 413, 415, 429, 500, 503, 504)
GET_ERRORS = (401, 404, 405)
CHAT_EXAMPLE = [{"role": "user", "content": "What is the capital of France?"}]
TOOL_EXAMPLE = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 8}},
    "required": ["word"],
    "additionalProperties": False,
}
MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A path, with the one method that it has."""

    path: str
    summary: str
    answer: type[msgspec.Struct] | None = None  # None: no type says more than the media type
    media_type: str = JSON
    body: type[msgspec.Struct] | None = None  # None: a GET
    events: tuple[type[msgspec.Struct], ...] = ()  # of a streamed answer
    examples: dict[str, dict[str, Any]] = field(default_factory=dict)
    statuses: tuple[int, ...] = (200,)  # with which the answer comes
    error: type[msgspec.Struct] = answers.ErrorEnvelope
    is_open: bool = False  # no API key is needed

    @property
    def method(self) -> str:
        """As OpenAPI writes it."""
        return "get" if self.body is None else "post"


OPERATIONS = (
    Operation(
        path="/v1/completions",
        summary="Continue texts, or lists of token ids",
        body=requests.CompletionBody,
        answer=answers.Completion,
        events=(answers.CompletionChunk,),
        examples={
            "text": {"prompt": "Once upon a time", "max_tokens": 20},
            "several": {"prompt": ["One, two,", "Un, deux,"], "n": 2, "max_tokens": 8, "temperature": 1, "seed": 1},
            "scores": {"prompt": "To be or not to be", "echo": True, "logprobs": 1, "max_tokens": 0},
            "stream": {"prompt": "Once", "max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}},
        },
    ),
    Operation(
        path="/v1/chat/completions",
        summary="Answer a conversation",
        body=requests.ChatBody,
        answer=answers.ChatCompletion,
        events=(answers.ChatCompletionChunk,),
        examples={
            "question": {"messages": CHAT_EXAMPLE, "max_tokens": 20},
            "stream": {"messages": CHAT_EXAMPLE, "max_tokens": 20, "stream": True},
            "choice": {"messages": CHAT_EXAMPLE, "guided_choice": ["Paris", "Rome"], "max_tokens": 8},
            "tool": {
                "messages": CHAT_EXAMPLE,
                "tools": [
                    {"type": "function", "function": {"name": "look_up", "parameters": TOOL_EXAMPLE}},
                ],
                "tool_choice": "auto",
                "max_tokens": 20,
            },
        },
    ),
    Operation(
        path="/generate",
        summary="Token ids in, token ids out",
        body=requests.GenerateBody,
        answer=answers.GeneratedIds,
        events=(answers.GeneratedIdsChunk,),
        examples={"ids": {"prompt_token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8}}},
    ),
    Operation(
        path="/tokenize",
        summary="The token ids of a text or a conversation",
        body=requests.TokenizeBody,
        answer=answers.Tokens,
        examples={
            "text": {"prompt": "Hello, world!", "return_token_strs": True},
            "conversation": {"messages": CHAT_EXAMPLE},
        },
    ),
    Operation(
        path="/detokenize",
        summary="The text of token ids",
        body=requests.DetokenizeBody,
        answer=answers.DetokenizedText,
        examples={"ids": {"tokens": [1, 2, 3]}},
    ),
    Operation(
        path="/v1/messages",
        summary="Answer a conversation, in the form of Anthropic's Messages API",
        body=anthropic_requests.MessagesBody,
        answer=anthropic_answers.AnsweredMessage,
        events=anthropic_answers.EVENTS,
        error=anthropic_answers.MessageError,
        examples={
            "question": {"model": MODEL, "max_tokens": 20, "messages": CHAT_EXAMPLE},
            "stream": {"model": MODEL, "max_tokens": 20, "messages": CHAT_EXAMPLE, "stream": True},
            "tool": {
                "model": MODEL,
                "max_tokens": 20,
                "system": [{"type": "text", "text": "Use your tools."}],
                "messages": CHAT_EXAMPLE,
                "tools": [{"name": "look_up", "input_schema": TOOL_EXAMPLE}],
                "tool_choice": {"type": "auto"},
            },
        },
    ),
    Operation(
        path="/v1/messages/count_tokens",
        summary="How many tokens such a conversation has",
        body=anthropic_requests.CountTokensBody,
        answer=anthropic_answers.TokenCount,
        error=anthropic_answers.MessageError,
        examples={"question": {"model": MODEL, "messages": CHAT_EXAMPLE}},
    ),
    Operation(
        path="/v1/responses",
        summary="Answer a conversation, in the form of OpenAI's Responses API; nothing is stored",
        body=responses_api_requests.ResponsesBody,
        answer=responses_api_answers.AnsweredResponse,
        events=responses_api_answers.EVENTS,
        examples={
            "question": {"input": CHAT_EXAMPLE[0]["content"], "max_output_tokens": 20},
            "stream": {"input": [{"type": "message", **CHAT_EXAMPLE[0]}], "max_output_tokens": 20, "stream": True},
            "tool": {
                "instructions": "Use your tools.",
                "input": [{"type": "message", **CHAT_EXAMPLE[0]}],
                "tools": [{"type": "function", "name": "look_up", "parameters": TOOL_EXAMPLE}],
                "tool_choice": "required",
                "max_output_tokens": 20,
            },
        },
    ),
    Operation(path="/v1/models", summary="The models that are served", answer=answers.ModelList),
    Operation(path="/v1/models/{model}", summary="One of them", answer=answers.Model),
    Operation(path="/health", summary="The HTTP process is alive", answer=answers.Status, is_open=True),
    Operation(
        path="/ready", summary="Every process is ready", answer=answers.Status, statuses=(200, 503), is_open=True
    ),
    Operation(path="/version", summary="The server's version", answer=answers.Version, is_open=True),
    Operation(path="/metrics", summary="Metrics, as Prometheus reads them", media_type="text/plain", is_open=True),
    Operation(path="/openapi.json", summary="This description, for programs", is_open=True),
    Operation(path="/docs", summary="This description, for people", media_type="text/html", is_open=True),
)


def document(version: str) -> Document:
    """The whole document. ``version``: of the server."""
    kinds: set[type[msgspec.Struct]] = set()
    for operation in OPERATIONS:
        kinds |= {kind for kind in (operation.answer, operation.error, *operation.events) if kind is not None}
        if operation.body is not None:
            kinds.add(described(operation.body))
    _, schemas = msgspec.json.schema_components(sorted(kinds, key=lambda kind: kind.__name__), ref_template=SCHEMAS)
    for kind in UNTYPED:
        schemas[kind.__name__]["required"].remove(kind.__struct_config__.tag_field)
    return {
        "openapi": "3.1.0",
        "info": {"title": "tokservice", "version": version, "description": DESCRIPTION},
        "servers": [{"url": "/"}],
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": {operation.path: {operation.method: _operation(operation)} for operation in OPERATIONS},
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "responses": {
                kind.__name__: _response("An error", {JSON: _schema(kind)})
                for kind in dict.fromkeys(operation.error for operation in OPERATIONS)
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", f"{operation.method}{operation.path}").strip("_")
    entry: dict[str, Any] = {"operationId": name, "summary": operation.summary}
    if operation.is_open:
        entry["security"] = []
    if "{model}" in operation.path:
        entry["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.body is not None:
        examples = {name: {"value": example} for name, example in operation.examples.items()}
        entry["requestBody"] = {
            "required": True,
            "content": {JSON: {**_schema(operation.body), "examples": examples}},
        }
    content = {operation.media_type: _schema(operation.answer) if operation.answer else {"schema": {}}}
    if operation.events:
        content[EVENTS] = {"schema": _event(operation)}
    responses = {str(status): _response(HTTPStatus(status).phrase, content) for status in operation.statuses}
    return {**entry, "responses": responses | _errors(operation)}


def _event(operation: Operation) -> dict[str, Any]:
    """One event: its data is JSON. Those of one type have no names, and end with [DONE]."""
    is_named = len(operation.events) > 1
    kinds = operation.events if is_named else (*operation.events, operation.error)
    data: dict[str, Any] = {"type": "string", "contentMediaType": JSON, "contentSchema": _schema(*kinds)["schema"]}
    if is_named:
        names = {"enum": [kind.__struct_config__.tag for kind in kinds]}
        return {"type": "object", "properties": {"event": names, "data": data}, "required": ["event", "data"]}
    return {"type": "object", "properties": {"data": {"anyOf": [data, {"enum": [DONE]}]}}, "required": ["data"]}


def _errors(operation: Operation) -> dict[str, Any]:
    statuses: Sequence[int] = (405,) if operation.is_open else POST_ERRORS if operation.body else GET_ERRORS
    ref = {"$ref": f"#/components/responses/{operation.error.__name__}"}
    return {str(status): ref for status in statuses}


def _response(description: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": content}


def _schema(*kinds: type[msgspec.Struct]) -> dict[str, Any]:
    refs = [{"$ref": SCHEMAS.format(name=kind.__name__)} for kind in kinds]
    return {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}
