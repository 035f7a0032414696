from __future__ import annotations

import json
import struct
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import tiny_tokenizers
from tests.helpers.sse import events
from tokservice.detokenizer import vocabulary
from tokservice.detokenizer.logprob_rows import LogprobRows
from tokservice.detokenizer.respond import Responder
from tokservice.protocol import context as contexts
from tokservice.protocol.context import Context
from tokservice.wire.messages import FinishReason, Route

RUNNING = FinishReason.RUNNING
VOCABULARY = vocabulary.build(tiny_tokenizers.parsed(tiny_tokenizers.byte_fallback()))
SIZE = len(VOCABULARY.all_bytes)
BYTES_OF_EURO = [VOCABULARY.all_bytes.index(bytes([byte]), 3) for byte in "€".encode()]

token_ids = st.lists(st.integers(0, SIZE - 1) | st.sampled_from(BYTES_OF_EURO), min_size=1, max_size=12)
steps = st.tuples(st.integers(0, 1), token_ids)
finishes = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])
stop_lists = st.lists(st.sampled_from(["€", "\x00", "in", " the", "a€", "hello"]), max_size=3, unique=True).map(tuple)


@st.composite
def details(draw: st.DrawFn, num_prompts: int, route: Route) -> dict[str, Any]:
    """What may be asked for beyond text."""
    prompts = tuple(struct.pack("<3I", 3, 4, BYTES_OF_EURO[0]) for _ in range(num_prompts))
    more: dict[str, Any] = {
        "num_logprobs": draw(st.integers(-1, 2)),
        "return_token_ids": draw(st.booleans()),
        "tokens_as_ids": draw(st.booleans()),
        "prompt_ids": draw(st.sampled_from([(), prompts])),
    }
    if more["prompt_ids"] and route == Route.COMPLETIONS:
        more |= {"echo": draw(st.booleans()), "prompt_texts": (None,) * num_prompts}
    if route == Route.CHAT_COMPLETIONS:
        more["tool_format"] = draw(st.sampled_from(["", "hermes", "llama3_json", "mistral", "json_list", "named"]))
        more |= {"tool_names": ("f",), "reasoning": draw(st.sampled_from(["", "tagged", "open", "inside"]))}
    return more


@st.composite
def requests(draw: st.DrawFn, stream: bool) -> tuple[bytes, list[tuple[int, list[int], FinishReason]]]:
    """A context of two choices, and the engine's steps for it: (choice, new tokens, finish reason)."""
    include_usage = draw(st.booleans())
    values: dict[str, Any] = {
        "route": draw(st.sampled_from([Route.COMPLETIONS, Route.CHAT_COMPLETIONS])),
        "response_id": "id",
        "created": 1,
        "model": "m",
        "n": draw(st.sampled_from([1, 2])),
        "stream": stream,
        "include_usage": include_usage,
        "continuous_usage": include_usage and draw(st.booleans()),
        "stop": draw(stop_lists),
        "include_stop": draw(st.booleans()),
        "skip_special_tokens": draw(st.booleans()),
        "min_tokens": draw(st.integers(0, 3)),
        "bare_prompts": draw(st.sampled_from([(), (0,)])),
    }
    num_prompts = 2 // values["n"]
    values["num_prompt_tokens"] = (3,) * num_prompts
    if draw(st.booleans()):
        values |= draw(details(num_prompts, values["route"]))
    running = [(choice, ids, RUNNING) for choice, ids in draw(st.lists(steps, max_size=8))]
    last = [(choice, draw(token_ids), draw(finishes)) for choice in (0, 1)]
    return contexts.encode(Context(**values)), [*running, *last]


def rows_of(ids: list[int]) -> LogprobRows:
    """Two alternatives for each token, and logprobs that tell tokens apart."""
    entries = [entry for token in ids for entry in (token, (token + 1) % SIZE, token)]
    return LogprobRows(3, entries, [-float(entry) for entry in entries])


def feed(responder: Responder, events: list[tuple[int, list[int], FinishReason]]) -> tuple[list[bytes], list[Any]]:
    fed = [responder.feed(choice, ids, reason, rows=rows_of(ids)) for choice, ids, reason in events]
    return [item.data for item in fed], fed


def told(parsed: list[dict[str, Any]], choice: int) -> dict[str, Any]:
    """All that events, or a body, say about a choice, joined."""
    found: dict[str, Any] = {"text": "", "thoughts": "", "calls": {}, "ids": [], "logprobs": []}
    for part in (item for event in parsed for item in event["choices"] if item["index"] == choice):
        message = part.get("delta", part.get("message", {}))
        found["text"] += part.get("text", message.get("content") or "")
        found["thoughts"] += message.get("reasoning_content") or ""
        for place, call in enumerate(message.get("tool_calls", ())):
            known = found["calls"].setdefault(call.get("index", place), {"name": "", "arguments": ""})
            for key, value in call["function"].items():
                known[key] += value
        found["ids"] += part.get("token_ids", [])
        logprobs = part["logprobs"] or {}
        content = logprobs.get("content")
        found["logprobs"] += list(zip(*logprobs.values(), strict=True)) if content is None else content
    return found


@given(requests(stream=True) | requests(stream=False), st.data())
def test_a_replay_goes_on_with_the_same_bytes(
    request: tuple[bytes, list[tuple[int, list[int], FinishReason]]], data: st.DataObject
) -> None:
    """Both at every cut and with a part of the consumed tokens not yet delivered."""
    context, steps = request
    expected, feds = feed(Responder(VOCABULARY, context), steps)
    cut = data.draw(st.integers(0, len(steps)))
    output_ids: list[list[int]] = [[], []]
    finished = [RUNNING, RUNNING]
    notes = [b"", b""]
    for (choice, ids, _), fed in zip(steps[:cut], feds[:cut], strict=True):
        notes[choice] += fed.note
        output_ids[choice] += ids[: fed.num_consumed]
        finished[choice] = fed.finish_reason or finished[choice]
    if any(fed.last for fed in feds[:cut]):
        return  # complete: nobody takes it over
    delivered = list(map(len, output_ids))
    successor = Responder(VOCABULARY, context, delivered, finished, output_ids, notes)
    owed = successor.begin()
    assert not owed
    actual, _ = feed(successor, steps[cut:])
    assert actual == expected[cut:]


@given(requests(stream=True), st.data())
def test_what_was_consumed_but_not_delivered_is_owed(
    request: tuple[bytes, list[tuple[int, list[int], FinishReason]]], data: st.DataObject
) -> None:
    context, steps = request
    _, feds = feed(Responder(VOCABULARY, context), steps)
    whole = b"".join(fed.data for fed in feds)
    output_ids: list[list[int]] = [[], []]
    finished = [RUNNING, RUNNING]
    notes = [b"", b""]
    for (choice, ids, _), fed in zip(steps, feds, strict=True):
        notes[choice] += fed.note
        output_ids[choice] += ids[: fed.num_consumed]
        finished[choice] = fed.finish_reason or finished[choice]
    delivered = [data.draw(st.integers(0, len(ids) - 1)) for ids in output_ids]
    before = Responder(VOCABULARY, context)
    seen = b"".join(
        before.feed(choice, ids[:num], RUNNING, rows=rows_of(ids[:num])).data
        for choice, (ids, num) in enumerate(zip(output_ids, delivered, strict=True))
        if num
    )
    successor = Responder(VOCABULARY, context, delivered, finished, output_ids, notes)
    stream = seen + b"".join(fed.data for fed in successor.begin())
    for choice in (0, 1):
        assert told(events(stream), choice) == told(events(whole), choice)


@given(requests(stream=True))
def test_stream_and_plain_response_agree(request: tuple[bytes, list[tuple[int, list[int], FinishReason]]]) -> None:
    context, steps = request
    streamed = b"".join(feed(Responder(VOCABULARY, context), steps)[0])
    decoded = contexts.decode(context)
    fields = {name: getattr(decoded, name) for name in decoded.__struct_fields__}
    plain = json.loads(
        b"".join(feed(Responder(VOCABULARY, contexts.encode(Context(**fields | {"stream": False}))), steps)[0])
    )
    parsed = events(streamed)
    for choice in plain["choices"]:
        assert told(parsed, choice["index"]) == told([{"choices": [choice]}], choice["index"])
        closing = [c for e in parsed for c in e["choices"] if c["index"] == choice["index"]][-1]
        assert closing["finish_reason"] == choice["finish_reason"] is not None
        agree(fields, told([{"choices": [choice]}], choice["index"]))
    if fields["include_usage"]:
        assert parsed[-1]["usage"] == plain["usage"]
    if fields["return_token_ids"]:
        assert sum(len(choice["token_ids"]) for choice in plain["choices"]) == plain["usage"]["completion_tokens"]


def agree(fields: dict[str, Any], choice: dict[str, Any]) -> None:
    """Ids, logprobs and text, with a stop string or without."""
    if fields["num_logprobs"] < 0:
        return
    if fields["return_token_ids"] and not fields["echo"]:
        assert len(choice["ids"]) == len(choice["logprobs"])
    if fields["route"] == Route.CHAT_COMPLETIONS and not (fields["tool_format"] or fields["reasoning"]):
        joined = bytes(byte for entry in choice["logprobs"] for byte in entry["bytes"])
        assert joined.decode(errors="replace") == choice["text"]
