"""The fields with which clients ask for structured output. Used by the tokenizer workers."""

from __future__ import annotations

import typing
from typing import Annotated

import msgspec
from msgspec import Raw

from tokservice.protocol.reading import NULL, Neutral, Refused, RefusedUnlessFalse, neutral_fields


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """``json_schema`` of a response format. ``strict`` false asks for less than what is done anyway."""

    schema: Raw = NULL
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """``response_format``"""

    type: typing.Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """``structured_outputs``: exactly one of the first five."""

    json: Raw = NULL
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Refused = NULL
    whitespace_pattern: Refused = NULL
    disable_fallback: RefusedUnlessFalse = NULL
    disable_any_whitespace: RefusedUnlessFalse = NULL
    disable_additional_properties: RefusedUnlessFalse = NULL
    backend: Annotated[Raw, Neutral("auto", "guidance")] = NULL


STRUCTURED_OUTPUTS_NEUTRAL = neutral_fields(StructuredOutputs)
