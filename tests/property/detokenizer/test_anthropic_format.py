"""``/v1/messages``: what a stream adds up to is the plain message, however the text came and whoever took it over."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import contexts
from tokservice.detokenizer.respond import Responder
from tokservice.detokenizer.vocabulary import Vocabulary
from tokservice.protocol.anthropic_answers import EVENTS, AnsweredMessage
from tokservice.wire.messages import FinishReason, Route

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
WORDS = ["a", " b", "<think>", "</think>", CALL, CALL[:33], CALL[33:], "\n", "st", "op", "€\u2028"]
VOCABULARY = Vocabulary(
    [word.encode() for word in WORDS], [word.encode() for word in WORDS], strips_leading_space=False
)
PAIR: Any = EVENTS[0]
for kind in EVENTS[1:]:
    PAIR = PAIR | kind
EVENT = msgspec.json.Decoder(PAIR)

ids = st.lists(st.integers(0, len(WORDS) - 1), max_size=12)
finishes = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])
shapes = st.fixed_dictionaries(
    {
        "tool_format": st.sampled_from(["", "hermes"]),
        "reasoning": st.sampled_from(["", "tagged", "open", "inside"]),
        "stop": st.sampled_from([(), ("stop", "b€")]),
        "omits_thoughts": st.booleans(),
        "more_fields": st.sampled_from([b"{}", b'{"context_management":{"applied_edits":[]}}']),
    }
)


def context(shape: dict[str, Any], *, stream: bool) -> bytes:
    return contexts.context(route=Route.MESSAGES, response_id="msg_1", stream=stream, tool_names=("f",), **shape)


def added_up(stream: bytes) -> dict[str, Any]:
    """The message that a strict client has after all events; it must have been told in the right order."""
    message: dict[str, Any] = {}
    open_block = -1
    texts: dict[int, str] = {}
    for event in stream.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        EVENT.decode(data.removeprefix("data: "))
        told = json.loads(data.removeprefix("data: "))
        assert name == f"event: {told['type']}"
        match told["type"]:
            case "message_start":
                assert not message
                message = told["message"]
                assert message["type"] == "message"
            case "content_block_start":
                assert open_block == -1
                open_block = told["index"]
                assert open_block == len(message["content"])
                message["content"].append(told["content_block"])
            case "content_block_delta":
                assert told["index"] == open_block
                kind = told["delta"].pop("type")
                ((field, text),) = told["delta"].items()
                assert text
                if kind == "input_json_delta":
                    texts[open_block] = texts.get(open_block, "") + text
                else:
                    message["content"][open_block][field] += text
            case "content_block_stop":
                assert told["index"] == open_block
                open_block = -1
            case "message_delta":
                assert open_block == -1
                message |= told.pop("delta")
                message["usage"] |= told.pop("usage")
                message |= {**told, "type": "message"}
    for index, text in texts.items():
        with suppress(json.JSONDecodeError):  # the end of the answer cut the call off
            message["content"][index]["input"] = json.loads(text)
    return message


@given(shapes, ids, finishes, st.data())
def test_a_stream_adds_up_to_the_plain_message(
    shape: dict[str, Any], token_ids: list[int], finish: FinishReason, data: st.DataObject
) -> None:
    plain = Responder(VOCABULARY, context(shape, stream=False)).feed(0, token_ids, finish)
    message = msgspec.to_builtins(msgspec.json.decode(plain.data, type=AnsweredMessage))
    responder = Responder(VOCABULARY, context(shape, stream=True))
    stream = b""
    start = num_consumed = 0
    cuts = data.draw(st.lists(st.tuples(st.integers(0, max(0, len(token_ids) - 1)), st.booleans()), max_size=4))
    for end, is_taken_over in [*sorted(cuts), (len(token_ids), None)]:
        fed = responder.feed(0, token_ids[start:end], FinishReason.RUNNING if is_taken_over is not None else finish)
        stream, start = stream + fed.data, end
        num_consumed += fed.num_consumed
        if fed.last:
            break
        if is_taken_over:
            seen = memoryview(struct.pack(f"<{num_consumed}I", *token_ids[:num_consumed])).cast("I")
            responder = Responder(VOCABULARY, context(shape, stream=True), [num_consumed], [0], [seen])
            stream += b"".join(owed.data for owed in responder.begin())
    assert added_up(stream) == message
    assert ("context_management" in message) == (shape["more_fields"] != b"{}")
    for block in message["content"]:
        if block["type"] == "thinking":
            assert block["signature"]
            assert bool(block["thinking"]) is not shape["omits_thoughts"]
