"""Responses that say more than text: logprobs, token ids, the prompt, tool calls, thoughts."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest

from tests.helpers.contexts import context
from tests.helpers.sse import events, text_of
from tests.unit.detokenizer.test_respond import (
    EOS,
    EURO_1,
    EURO_2,
    LENGTH,
    MESSAGE,
    RUNNING,
    SPACED,
    STOP,
    VOCABULARY,
    A,
    B,
    C,
)
from tokservice.detokenizer import prompt_report
from tokservice.detokenizer.logprob_rows import About, LogprobRows, read_note, write_note
from tokservice.detokenizer.respond import Fed, Responder
from tokservice.detokenizer.slices import Pace, at_once
from tokservice.protocol.parts import PromptReport
from tokservice.wire.errors import WireError
from tokservice.wire.messages import FinishReason, Route

COMPLETION: dict[str, Any] = {"route": Route.COMPLETIONS, "response_id": "cmpl-1"}


def rows(*token_ids: int, values: tuple[float, ...] = (-0.5, -0.25, -1.5)) -> LogprobRows:
    """Each token and the two most likely ones: C and the token itself."""
    ids = [entry for token in token_ids for entry in (token, C, token)]
    return LogprobRows(3, ids, list(values) * len(token_ids))


def run(steps: list[list[int]], finish: FinishReason = LENGTH, **fields: Any) -> bytes:
    """The response to some steps of one choice, with logprobs."""
    made = Responder(VOCABULARY, context(**fields))
    data = b""
    for place, ids in enumerate(steps):
        reason = finish if place == len(steps) - 1 else RUNNING
        data += made.feed(0, ids, reason, rows=rows(*ids)).data
    return data


def plain(steps: list[list[int]], finish: FinishReason = LENGTH, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(run(steps, finish, stream=False, **fields))
    return body["choices"][0]  # type: ignore[no-any-return]


def test_chat_logprobs_have_the_true_bytes() -> None:
    """Entries of byte fragments showed U+FFFD with its own bytes: ollama#13497."""
    choice = plain([[A], [EURO_1], [EURO_2]], num_logprobs=1)
    content = choice["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == choice["message"]["content"] == "a€"
    assert content[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [{"token": "c", "logprob": -0.25, "bytes": [99]}],
    }
    assert content[1]["token"] == "bytes:\\xe2\\x82"


def test_chat_logprobs_without_the_most_likely_tokens() -> None:
    """logprobs without top_logprobs was an error: vllm#4795."""
    entry = plain([[A]], num_logprobs=0)["logprobs"]["content"][0]
    assert entry["top_logprobs"] == []
    assert plain([[A]])["logprobs"] is None


def test_completion_logprobs() -> None:
    choice = plain([[A, EURO_1], [EURO_2, B]], num_logprobs=1, **COMPLETION)
    assert choice["logprobs"] == {
        "tokens": ["a", "bytes:\\xe2\\x82", "bytes:\\xac", "b"],
        "token_logprobs": [-0.5] * 4,
        "top_logprobs": [
            {"c": -0.25, "a": -0.5},
            {"c": -0.25, "bytes:\\xe2\\x82": -0.5},
            {"c": -0.25, "bytes:\\xac": -0.5},
            {"c": -0.25, "b": -0.5},
        ],
        "text_offset": [0, 1, 1, 2],
    }


def test_tokens_as_ids() -> None:
    choice = plain([[A]], num_logprobs=1, tokens_as_ids=True, **COMPLETION)
    assert choice["logprobs"]["top_logprobs"] == [{f"token_id:{C}": -0.25, f"token_id:{A}": -0.5}]


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30])
def test_infinities_are_floored(value: float) -> None:
    """Minus infinity cannot be written as JSON: sglang#5984."""
    made = Responder(VOCABULARY, context(stream=False, num_logprobs=2))
    body = made.feed(0, [A], LENGTH, rows=rows(A, values=(value, -1.0, value))).data
    entry = json.loads(body, parse_constant=pytest.fail)["choices"][0]["logprobs"]["content"][0]
    assert (entry["logprob"], entry["top_logprobs"][1]["logprob"]) == (-9999.0, -9999.0)


def test_the_end_token_has_an_entry_without_bytes() -> None:
    choice = plain([[A], [EOS]], STOP, num_logprobs=0)
    assert [(entry["token"], entry["bytes"]) for entry in choice["logprobs"]["content"]] == [("a", [97]), ("<eos>", [])]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("stop", "text", "shown"),
    [
        ("bc", "a€", [[A], [EURO_1], [EURO_2], [], []]),  # whole tokens
        ("th", " in ", [[SPACED]]),  # the beginning of a token's text stays
        ("€b", "a", [[A], [], [], []]),  # as does none of a character
    ],
)
@pytest.mark.parametrize("route", [Route.COMPLETIONS, Route.CHAT_COMPLETIONS])
def test_ids_logprobs_and_text_agree_where_a_stop_string_ends_it(
    stop: str, text: str, shown: list[list[int]], route: Route
) -> None:
    """All ids were told, but no logprobs for those of the stop string, so that no client could pair them."""
    tokens = [SPACED] if stop == "th" else [A, EURO_1, EURO_2, B, C]
    fields: dict[str, Any] = {"route": route, "num_logprobs": 0, "return_token_ids": True, "stop": (stop,)}
    steps = [[token] for token in [*tokens, A]]
    choice = plain(steps, **fields)
    assert choice["token_ids"] == tokens[: len(shown)]
    parts = [part for event in events(run(steps, **fields)) for part in event["choices"]]
    assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
    if route == Route.COMPLETIONS:
        assert choice["text"] == text
        assert len(choice["logprobs"]["tokens"]) == len(shown)
        assert max(choice["logprobs"]["text_offset"]) <= len(text)
        for key, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][key]] == values
        return
    entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == choice["message"]["content"] == text
    whole = [b"".join(VOCABULARY.all_bytes[token] for token in ids) for ids in shown]
    assert all(bytes(entry["bytes"]) in (data, text.encode()) for entry, data in zip(entries, whole, strict=True))
    assert [entry for part in parts for entry in part["logprobs"]["content"]] == entries


@pytest.mark.parametrize("steps", [[[A], [B], [EURO_1], [EURO_2], [EOS]], [[A, B, EURO_1], [EURO_2, EOS]]])
@pytest.mark.parametrize("route", [Route.COMPLETIONS, Route.CHAT_COMPLETIONS])
def test_streamed_entries_are_those_of_the_plain_answer(steps: list[list[int]], route: Route) -> None:
    fields: dict[str, Any] = {"route": route, "num_logprobs": 1, "return_token_ids": True, "stop": ("bx",)}
    whole = plain(steps, STOP, **fields)
    parts = [choice for event in events(run(steps, STOP, **fields)) for choice in event["choices"]]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    key = "content" if route == Route.CHAT_COMPLETIONS else "token_logprobs"
    streamed = [entry for part in parts for entry in part["logprobs"][key]]
    assert streamed == whole["logprobs"][key]


def prompt_fields(*token_ids: int, text: str | None = None, **fields: Any) -> dict[str, Any]:
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    sizes = {"num_prompt_tokens": (len(token_ids),), "prompt_ids": (packed,), "prompt_texts": (text,)}
    return COMPLETION | sizes | fields


def scored(made: Responder, *prompt: int) -> Responder:
    made.score_prompt(0, rows(*prompt[1:]))
    return made


@pytest.mark.parametrize("stream", [True, False])
def test_echo_with_logprobs_and_no_output(stream: bool) -> None:
    """max_tokens 0 with echo crashed the server: vllm#6521."""
    fields = prompt_fields(A, EURO_1, EURO_2, B, text="a€b", echo=True, num_logprobs=1, stream=stream)
    data = scored(Responder(VOCABULARY, context(**fields)), A, EURO_1, EURO_2, B).feed(0, [], LENGTH).data
    choice = (events(data)[0] if stream else json.loads(data))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("a€b", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2]


def test_echoed_text_comes_first_and_shifts_the_offsets() -> None:
    fields = prompt_fields(A, B, text="ab", echo=True, num_logprobs=0, stream=False)
    made = scored(Responder(VOCABULARY, context(**fields)), A, B)
    choice = json.loads(made.feed(0, [C], LENGTH, rows=rows(C)).data)["choices"][0]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("abc", [0, 1, 2])


def test_the_echo_of_ids_is_their_text_and_comes_once() -> None:
    made = Responder(VOCABULARY, context(**prompt_fields(SPACED, A, EOS, echo=True)))
    stream = made.feed(0, [B], RUNNING).data + made.feed(0, [C], LENGTH).data
    assert text_of(events(stream)) == "in theabc"


def test_the_text_of_the_client_is_echoed_even_where_ids_say_more() -> None:
    """The tokenizer put an end token there; the client wrote one."""
    for text, offsets in (("ab", [0, 1, 1, 2]), ("a<eos>b", [0, 1, 6, 7])):
        fields = prompt_fields(A, EOS, B, text=text, echo=True, num_logprobs=0, stream=False)
        made = scored(Responder(VOCABULARY, context(**fields)), A, EOS, B)
        choice = json.loads(made.feed(0, [C], LENGTH, rows=rows(C)).data)["choices"][0]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == (text + "c", offsets)


def test_prompt_logprobs_and_ids() -> None:
    fields = prompt_fields(A, B, return_token_ids=True, num_prompt_logprobs=1, stream=False)
    for route in (Route.COMPLETIONS, Route.CHAT_COMPLETIONS):
        made = scored(Responder(VOCABULARY, context(**fields | {"route": route})), A, B)
        body = json.loads(made.feed(0, [C], LENGTH).data)
        where = body if route == Route.CHAT_COMPLETIONS else body["choices"][0]
        assert where["prompt_token_ids"] == [A, B]
        assert where["prompt_logprobs"] == [
            None,
            {
                str(C): {"logprob": -0.25, "rank": 1, "decoded_token": "c"},
                str(B): {"logprob": -0.5, "rank": None, "decoded_token": "b"},
            },
        ]
        assert body["choices"][0]["token_ids"] == [C]


def test_generate_gives_ids_at_once() -> None:
    fields = {"route": Route.GENERATE, "num_logprobs": 1, "stop": ("abx",)}
    made = Responder(VOCABULARY, context(**fields))
    first = made.feed(0, [A, EURO_1], RUNNING, rows=rows(A, EURO_1)).data
    last = made.feed(0, [EOS], STOP, rows=rows(EOS)).data
    choices = [event["choices"][0] for event in events(first + last)]
    assert [choice["token_ids"] for choice in choices] == [[A, EURO_1], [EOS]]
    assert choices[0]["logprobs"][0] == {
        "token_id": A,
        "logprob": -0.5,
        "top_logprobs": [{"token_id": C, "logprob": -0.25}],
    }
    assert choices[1]["finish_reason"] == "stop"


@pytest.mark.parametrize("steps", [[[A], [B], [C], [A]], [[A, B, C, A]]])
def test_generate_gives_the_ids_of_a_stop_string_with_their_logprobs(steps: list[list[int]]) -> None:
    fields: dict[str, Any] = {"route": Route.GENERATE, "num_logprobs": 0, "stop": ("bc",)}
    whole = plain(steps, **fields)
    parts = [event["choices"][0] for event in events(run(steps, **fields))]
    assert whole["token_ids"] == [entry["token_id"] for entry in whole["logprobs"]] == [A, B, C]
    for key in ("token_ids", "logprobs"):
        assert [entry for part in parts for entry in part[key]] == whole[key]


# --- tool calls and thoughts in the forms of chat -------------------------------------------------------------

WORDS = [
    "<think>",
    "hm",
    "</think>",
    "Yes. ",
    "<tool_call>",
    '{"name": "f", "arguments": ',
    '{"a":',
    "1}}",
    "</tool_call>",
]


def chat_words() -> Any:
    data = [word.encode() for word in WORDS]
    return type(VOCABULARY)(data, data, strips_leading_space=False)


def test_a_message_with_thoughts_text_and_a_call() -> None:
    fields = {"tool_format": "hermes", "tool_names": ("f",), "reasoning": "tagged"}
    ids = list(range(len(WORDS)))
    body = json.loads(Responder(chat_words(), context(stream=False, **fields)).feed(0, ids, STOP).data)
    choice = body["choices"][0]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {**MESSAGE, "content": "Yes. ", "reasoning_content": "hm"}
    assert call["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert choice["finish_reason"] == "tool_calls"

    made = Responder(chat_words(), context(**fields))
    stream = b"".join(made.feed(0, [i], STOP if i == ids[-1] else RUNNING).data for i in ids)
    deltas = [event["choices"][0]["delta"] for event in events(stream)]
    assert deltas[0] == {"role": "assistant", "content": None, "reasoning_content": "hm"}
    assert deltas[1] == {"content": "Yes. "}
    begin = {"index": 0, "id": call["id"], "type": "function", "function": {"name": "f", "arguments": '{"a":'}}
    assert deltas[2] == {"tool_calls": [begin]}
    assert deltas[3] == {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}
    assert events(stream)[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("route", [Route.CHAT_COMPLETIONS, Route.MESSAGES, Route.RESPONSES])
def test_tokens_of_thoughts_are_counted_however_they_come(route: Route) -> None:
    """A step of several tokens, as after a death, counted what followed the thoughts in it too."""
    fields: dict[str, Any] = {"route": route, "reasoning": "tagged", "stream": False, "more_fields": b'{"x":1}'}
    for steps in ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 1], [2, 3]]):
        made = Responder(chat_words(), context(**fields))
        for place, ids in enumerate(steps):
            data = made.feed(0, ids, LENGTH if place == len(steps) - 1 else RUNNING).data
        usage = json.loads(data)["usage"]
        details = usage["completion_tokens_details" if "completion_tokens" in usage else "output_tokens_details"]
        assert list(details.values()) == [2]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_says_its_namespace_apart(stream: bool) -> None:
    """Clients that know a tool by both could not run it by its whole name: vllm#46737."""
    words = [b'<tool_call>\n{"name": "a__f", "arguments": {}}\n</tool_call>']
    vocabulary = type(VOCABULARY)(words, words, strips_leading_space=False)
    tools = {"tool_format": "hermes", "tool_names": ("a__f", "f"), "namespaces": {"a__f": "a"}}
    fields = {"route": Route.RESPONSES, "more_fields": b'{"store":false}', "stream": stream}
    data = Responder(vocabulary, context(**fields, **tools)).feed(0, [0], LENGTH).data
    response = json.loads(data.decode().split("\ndata: ")[-1])
    (call,) = (response["response"] if stream else response)["output"]
    assert (call["name"], call["namespace"], call["arguments"]) == ("f", "a", "{}")


def test_a_call_that_was_cut_off_ends_for_its_length() -> None:
    fields = {"tool_format": "hermes", "tool_names": ("f",), "stream": False}
    choice = json.loads(Responder(chat_words(), context(**fields)).feed(0, [4, 5, 6], LENGTH).data)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a":'


# --- the journal ----------------------------------------------------------------------------------------------


def test_a_plain_answer_that_was_taken_over_has_the_logprobs_of_all_tokens() -> None:
    """The journal holds token ids, from which logprobs cannot be had again."""
    fields = prompt_fields(A, B, text="ab", echo=True, num_logprobs=1, num_prompt_logprobs=0, stream=False)
    first = scored(Responder(VOCABULARY, context(**fields)), A, B)
    feds = [first.feed(0, [A], RUNNING, rows=rows(A)), first.feed(0, [B, C], RUNNING, rows=rows(B, C))]
    expected = first.feed(0, [EOS], STOP, rows=rows(EOS)).data
    note = b"".join(fed.note for fed in feds)
    successor = Responder(VOCABULARY, context(**fields), [3], [RUNNING], [[A, B, C]], [note])
    assert successor.begin() == []
    scored(successor, A, B)  # the engine scores the prompt anew
    assert successor.feed(0, [EOS], STOP, rows=rows(EOS)).data == expected


def test_the_note_is_about_what_was_consumed() -> None:
    made = Responder(VOCABULARY, context(num_logprobs=0, stop=("b",)))
    fed = made.feed(0, [A, B, C], RUNNING, rows=rows(A, B, C))
    assert (fed.num_consumed, fed.finish_reason) == (2, STOP)
    assert len(at_once(read_note(fed.note, Pace()))[About.OUTPUT]) == 2
    assert made.feed(0, [C], RUNNING, rows=rows(C)) == Fed(0)


def test_bare_responses_leave_no_notes() -> None:
    assert Responder(VOCABULARY, context()).feed(0, [A], RUNNING).note == b""
    assert Responder(VOCABULARY, context(return_token_ids=True)).feed(0, [A], RUNNING).note == b""


@pytest.mark.parametrize(
    "note", [b"x", bytes(12), write_note(About.OUTPUT, rows(A))[:-1], write_note(About.OUTPUT, rows(A, B))]
)
def test_a_note_that_does_not_fit_is_a_wire_error(note: bytes) -> None:
    taken_over = Responder(VOCABULARY, context(num_logprobs=1), [1], [RUNNING], [[A]], [note])
    with pytest.raises(WireError):
        taken_over.begin()


@pytest.mark.parametrize("same", [True, False])
def test_what_choices_say_of_their_prompt_is_made_once(monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    """Each choice made it anew."""
    reports = []

    def report(*arguments: Any) -> PromptReport:
        reports.append(arguments)
        return PromptReport(*arguments)

    monkeypatch.setattr(prompt_report, "PromptReport", report)
    fields: dict[str, Any] = {"prompt_ids": (struct.pack("<2I", A, B),), "num_prompt_tokens": (2,), "n": 2}
    made = Responder(VOCABULARY, context(**COMPLETION, **fields, stream=False, num_prompt_logprobs=2))
    for choice, values in ((0, (-0.5, -0.25, -1.5)), (1, (-0.5, -0.25, -1.5 if same else -2.5))):
        made.score_prompt(choice, rows(B, values=values))
        data = made.feed(choice, [C], LENGTH).data
    first, second = (choice["prompt_logprobs"] for choice in json.loads(data)["choices"])
    assert len(reports) == (1 if same else 2)
    assert (first == second) is same
