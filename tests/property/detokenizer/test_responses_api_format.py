"""``/v1/responses``: the events of a stream are the same however the tokens came and whoever took it over, and they add
up to the plain response.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Union

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import contexts
from tokservice.detokenizer.logprob_rows import LogprobRows
from tokservice.detokenizer.respond import Responder
from tokservice.detokenizer.vocabulary import Vocabulary
from tokservice.protocol.responses_api_answers import EVENTS, AnsweredResponse
from tokservice.protocol.responses_api_requests import ResponsesBody
from tokservice.tokenizer.responses_api_chat import repeated_fields
from tokservice.tokenizer.sampling import GenerationDefaults
from tokservice.wire.messages import FinishReason, Route

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
PATCH = '<tool_call>\n{"name": "p", "arguments": {"input": "a\\n\\ud83d\\ude00"}}\n</tool_call>'
CALLS = [CALL, CALL[:33], CALL[33:], PATCH, PATCH[:50]]
WORDS = ["a", " b", "<think>", "</think>", *CALLS, "\n", "st", "op", "€\u2028", "\u20ac"]
PIECES = [word.encode() for word in WORDS[:-1]] + [b"\xe2\x82", b"\xac"]  # the last one is halved
VOCABULARY = Vocabulary(PIECES, PIECES, strips_leading_space=False)
EVENT = msgspec.json.Decoder(Union[EVENTS])  # noqa: UP007

ids = st.lists(st.integers(0, len(PIECES) - 1), max_size=12)
finishes = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])
shapes = st.fixed_dictionaries({"stop": st.sampled_from([(), ("stop", "b€")])}).flatmap(
    lambda shape: st.one_of(
        st.fixed_dictionaries(
            {
                "tool_format": st.sampled_from(["", "hermes"]),
                "reasoning": st.sampled_from(["", "tagged", "open", "inside"]),
                "stop": st.just(shape["stop"]),
            }
        ),
        st.just({"num_logprobs": 1, **shape}),
    )
)


def context(shape: dict[str, Any], *, stream: bool) -> bytes:
    repeated = repeated_fields(ResponsesBody(input="x", metadata={"a": "\u2028\n"}), GenerationDefaults())
    return contexts.context(
        route=Route.RESPONSES,
        response_id="resp_1",
        stream=stream,
        tool_names=("f", "p"),
        custom_tools=("p",),
        more_fields=repeated,
        **shape,
    )


def rows(shape: dict[str, Any], token_ids: list[int]) -> LogprobRows | None:
    """Each token and a most likely one."""
    if "num_logprobs" not in shape:
        return None
    both = [entry for token in token_ids for entry in (token, 0)]
    return LogprobRows(2, both, [-0.5, -0.25] * len(token_ids))


def feed(responder: Responder, shape: dict[str, Any], token_ids: list[int], finish: FinishReason) -> Any:
    return responder.feed(0, token_ids, finish, rows=rows(shape, token_ids))


def added_up(stream: bytes) -> dict[str, Any]:
    """The response that a strict client has after all events; it must have been told in the right order."""
    assert len(stream.decode().splitlines()) == stream.count(b"\n")
    response: dict[str, Any] = {}
    items: list[dict[str, Any]] = []
    is_open = False
    for number, event in enumerate(stream.decode().split("\n\n")[:-1]):
        name, data = event.split("\n")
        EVENT.decode(data.removeprefix("data: "))
        told = json.loads(data.removeprefix("data: "))
        kind = told["type"]
        assert (name, told["sequence_number"]) == (f"event: {kind}", number)
        if kind in ("response.created", "response.in_progress"):
            assert number == ["response.created", "response.in_progress"].index(kind)
            assert told["response"]["output"] == []
            assert told["response"]["usage"] is None
        elif "response" in told:
            response = told["response"]
            assert kind == f"response.{response['status']}"
        elif kind == "response.output_item.added":
            assert not is_open
            assert told["output_index"] == len(items)
            is_open = True
            items.append(told["item"])
            assert items[-1].pop("status") == "in_progress"
        elif kind == "response.output_item.done":
            item = told["item"]
            assert item.pop("status") in ("completed", "incomplete")
            assert (items[-1], is_open) == (item, True)
            is_open = False
        elif "part" in told:
            content = items[told["output_index"]]["content"]
            if kind.endswith("added"):
                content.append(told["part"])
            assert content[told["content_index"]] == told["part"]
        else:
            item = items[told["output_index"]]
            assert (told["item_id"], is_open) == (item["id"], True)
            where = item["content"][told["content_index"]] if "content_index" in told else item
            field = {"function_call": "arguments", "custom_tool_call": "input"}.get(item["type"], "text")
            if kind.endswith(".delta"):
                assert told["delta"] or item["type"] != "message"
                where[field] += told["delta"]
            else:
                assert told[field] == where[field]
            if "logprobs" in told:
                entries = told["logprobs"]
                where["logprobs"] = where["logprobs"] + entries if kind.endswith(".delta") else entries
    assert not is_open
    assert len({item["id"] for item in items}) == len(items)
    for item, final in zip(items, response["output"], strict=True):
        assert item == {key: value for key, value in final.items() if key != "status"}
    return response


@given(shapes, ids, finishes, st.data())
def test_a_stream_adds_up_to_the_plain_response(
    shape: dict[str, Any], token_ids: list[int], finish: FinishReason, data: st.DataObject
) -> None:
    plain = feed(Responder(VOCABULARY, context(shape, stream=False)), shape, token_ids, finish)
    message = json.loads(plain.data)
    msgspec.json.decode(plain.data, type=AnsweredResponse)
    undisturbed = feed(Responder(VOCABULARY, context(shape, stream=True)), shape, token_ids, finish).data

    responder = Responder(VOCABULARY, context(shape, stream=True))
    stream = note = b""
    start = num_consumed = 0
    cuts = data.draw(st.lists(st.tuples(st.integers(0, max(0, len(token_ids) - 1)), st.booleans()), max_size=4))
    for end, is_taken_over in [*sorted(cuts), (len(token_ids), None)]:
        ends = is_taken_over is None
        fed = feed(responder, shape, token_ids[start:end], finish if ends else FinishReason.RUNNING)
        stream, note, start = stream + fed.data, note + fed.note, end
        num_consumed += fed.num_consumed
        if fed.last:
            break
        if is_taken_over:
            seen = memoryview(struct.pack(f"<{num_consumed}I", *token_ids[:num_consumed])).cast("I")
            responder = Responder(VOCABULARY, context(shape, stream=True), [num_consumed], [0], [seen], [note])
            stream += b"".join(owed.data for owed in responder.begin())
    assert stream == undisturbed
    response = added_up(stream)
    assert response == message
    assert (response["status"] == "incomplete") == (response["incomplete_details"] is not None)
    details = response["usage"]["output_tokens_details"]
    assert 0 <= details["reasoning_tokens"] <= response["usage"]["output_tokens"] <= len(token_ids)
    if any(item["type"] == "reasoning" and item["content"][0]["text"] for item in response["output"]):
        assert details["reasoning_tokens"] > 0
    for item in response["output"]:
        if "num_logprobs" in shape:
            (part,) = item["content"]
            joined = bytes(byte for entry in part["logprobs"] for byte in entry["bytes"])
            assert joined.decode(errors="replace") == part["text"]


def test_the_fields_of_the_request_are_described() -> None:
    """What an answer repeats is a part of its type: nothing is forgotten on either side."""
    repeated = json.loads(repeated_fields(ResponsesBody(input="x"), GenerationDefaults()))
    answered = [field.name for field in msgspec.structs.fields(AnsweredResponse)]
    assert answered[-len(repeated) :] == list(repeated)
