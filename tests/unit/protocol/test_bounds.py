from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokservice.protocol.anthropic_requests import MessagesBody
from tokservice.protocol.bounds import Bounds, bounds_of
from tokservice.protocol.openapi import OPERATIONS, document
from tokservice.protocol.reading import Reader
from tokservice.protocol.requests import ChatBody, CompletionBody, GenerateSampling
from tokservice.protocol.responses_api_requests import ResponsesBody
from tokservice.wire.errors import RequestError

SCHEMAS = document("1.2.3")["components"]["schemas"]
BODIES = [operation.body for operation in OPERATIONS if operation.body] + [GenerateSampling]
# Numbers without an end of their own: the vocabulary, the context or the model's folder has it.
UNBOUNDED = {"top_k"}


def numbers(schema: Any) -> list[dict[str, Any]]:
    """The schemas of numbers among those of a field."""
    return [part for part in schema.get("anyOf", [schema]) if part.get("type") in ("integer", "number")]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_the_document_says_what_is_checked(body: type[msgspec.Struct]) -> None:
    bounds = bounds_of(body)
    for name, schema in SCHEMAS[body.__name__]["properties"].items():
        for part in numbers(schema):
            assert (name in bounds) != (name in UNBOUNDED), name
            if name in bounds:
                low = part["exclusiveMinimum" if bounds[name].above_low else "minimum"]
                assert (low, part.get("maximum")) == (bounds[name].low, bounds[name].high)
    assert bounds.keys() <= SCHEMAS[body.__name__]["properties"].keys()


@pytest.mark.parametrize("body", [MessagesBody, ResponsesBody], ids=lambda body: body.__name__)
def test_other_apis_have_the_bounds_of_chat_completions(body: type[msgspec.Struct]) -> None:
    """They are turned into chat requests, which are not checked again."""
    chat, other = bounds_of(ChatBody), bounds_of(body)
    for field in msgspec.structs.fields(body):
        if field.name in chat and field.name != "max_tokens":
            assert other[field.name] == chat[field.name]


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("temperature", -0.1, "must be between 0 and 100"),
        ("temperature", 1e300, "must be between 0 and 100"),
        ("top_p", 0, "must be above 0 and at most 1"),
        ("presence_penalty", 2.01, "must be between -2 and 2"),
        ("seed", 2**63, "must be between"),
        ("seed", 10**30, "must be between"),
        ("logprobs", 21, "must be between 0 and 20"),
        ("truncate_prompt_tokens", -2, "must be at least -1"),
    ],
)
def test_what_is_out_of_bounds_is_named(field: str, value: float, rule: str) -> None:
    with pytest.raises(RequestError, match=rule) as caught:
        Reader(CompletionBody).read(msgspec.json.encode({"prompt": "x", field: value}))
    assert (caught.value.status, caught.value.param) == (400, field)


def test_both_ends_are_allowed() -> None:
    for values in ({"top_p": 1, "seed": -(2**63), "min_p": 0}, {"top_p": 1e-9, "seed": 2**63 - 1, "min_p": 1}):
        Reader(CompletionBody).read(msgspec.json.encode({"prompt": "x", **values}))
    assert Bounds(0, 1).allow(1)
    assert not Bounds(0, 1, above_low=True).allow(0)
