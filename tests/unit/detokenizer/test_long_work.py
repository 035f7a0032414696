"""No request makes a worker do much in one go: what takes long is cut into slices, and the end of a long answer has
little left to do."""

from __future__ import annotations

import gc
import struct
from typing import Any

import pytest

from tests.helpers.contexts import context
from tests.unit.detokenizer.test_respond import EOS, LENGTH, RUNNING, VOCABULARY, A, B, C
from tokservice.detokenizer.logprob_rows import LogprobRows
from tokservice.detokenizer.respond import Fed, Responder, Work
from tokservice.detokenizer.slices import SLICE
from tokservice.detokenizer.token_names import TokenNames
from tokservice.wire.messages import Route

NUM_TOKENS = 4000
NUM_TOP = 3
ROUTES = [Route.COMPLETIONS, Route.CHAT_COMPLETIONS, Route.GENERATE, Route.RESPONSES]
COMPLETION: dict[str, Any] = {"route": Route.COMPLETIONS, "response_id": "cmpl-1"}
PROMPT = [A, B, C, EOS] * (NUM_TOKENS // 4)
PROMPT_FIELDS = COMPLETION | {
    "num_prompt_tokens": (NUM_TOKENS,),
    "prompt_ids": (struct.pack(f"<{NUM_TOKENS}I", *PROMPT),),
    "prompt_texts": (None,),
}


def rows(token_ids: list[int]) -> LogprobRows:
    """The token itself, and as many others."""
    ids = [entry for token in token_ids for entry in (token, *range(NUM_TOP))]
    return LogprobRows(1 + NUM_TOP, ids, [-0.5] * len(ids))


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many entries about tokens were made so far, the most likely ones included."""
    counted = [0]
    entry = TokenNames.entry

    def count(names: TokenNames, *arguments: Any) -> Any:
        counted[0] += 1 + NUM_TOP
        return entry(names, *arguments)

    monkeypatch.setattr(TokenNames, "entry", count)
    return counted


def slices_of(work: Work, entries: list[int]) -> tuple[list[int], Fed]:
    """The entries that each slice made, and what came of the work."""
    made, fed = [], None
    before = entries[0]
    for fed in work:  # noqa: B007
        made.append(entries[0] - before)
        before = entries[0]
    assert fed is not None
    return made, fed


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": False, "num_prompt_logprobs": NUM_TOP},
        {"stream": False, "num_logprobs": NUM_TOP, "echo": True},
        {"stream": True, "num_logprobs": NUM_TOP, "echo": True},
    ],
    ids=["prompt_logprobs", "echo", "echo-stream"],
)
def test_a_long_prompt_is_reported_in_slices(entries: list[int], fields: dict[str, Any]) -> None:
    """Other streams stood still for a second."""
    made = Responder(VOCABULARY, context(**PROMPT_FIELDS, **fields))
    made.score_prompt(0, rows(PROMPT[1:]))
    slices, fed = slices_of(made.feeding(0, [A], LENGTH, 0, rows([A])), entries)
    assert fed.last
    assert sum(slices) >= NUM_TOKENS * (1 + NUM_TOP)
    assert max(slices) <= 2 * SLICE


@pytest.mark.parametrize("fields", [{"echo": True}, {"return_token_ids": True}], ids=["echo", "ids"])
def test_a_long_prompt_is_repeated_in_slices(entries: list[int], fields: dict[str, Any]) -> None:
    made = Responder(VOCABULARY, context(**PROMPT_FIELDS, stream=False, **fields))
    slices, fed = slices_of(made.feeding(0, [A], LENGTH), entries)
    assert fed.status == 200
    assert len(slices) > NUM_TOKENS // (2 * SLICE)


def test_tokens_without_text_that_come_out_together_do_so_in_slices(entries: list[int]) -> None:
    """They wait for the next text: here for the end."""
    made = Responder(VOCABULARY, context(**COMPLETION, num_logprobs=NUM_TOP))
    for _ in range(NUM_TOKENS):
        assert made.feed(0, [EOS], RUNNING, 0, rows([EOS])).data == b""
    slices, fed = slices_of(made.feeding(0, [EOS], LENGTH, 0, rows([EOS])), entries)
    assert fed.data.count(b'"<eos>":') == NUM_TOKENS + 1
    assert max(slices) <= 2 * SLICE


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("with_logprobs", [True, False])
def test_a_request_is_taken_over_in_slices(entries: list[int], stream: bool, with_logprobs: bool) -> None:
    """Reading the notes of 4,000 steps took half a second."""
    fields = COMPLETION | {"stream": stream, "num_logprobs": NUM_TOP if with_logprobs else -1}
    first = Responder(VOCABULARY, context(**fields))
    scored = rows([A]) if with_logprobs else None
    notes = [first.feed(0, [A], RUNNING, 0, scored).note for _ in range(NUM_TOKENS)]
    journal = ([NUM_TOKENS], [LENGTH], [[A] * NUM_TOKENS], [b"".join(notes)])
    slices, fed = slices_of(Responder(VOCABULARY, context(**fields), *journal).beginning(), entries)
    assert fed.last
    assert len(slices) > NUM_TOKENS // (2 * SLICE)
    assert max(slices) <= 2 * SLICE


@pytest.mark.parametrize("route", ROUTES)
def test_little_is_left_for_the_end_of_a_long_answer(entries: list[int], route: Route) -> None:
    """All that a plain answer says about its tokens was written at its end, for seconds."""
    made = Responder(VOCABULARY, context(route=route, num_logprobs=NUM_TOP, stream=False, more_fields=b'{"x":1}'))
    for _ in range(NUM_TOKENS):
        made.feed(0, [A], RUNNING, 0, rows([A]))
    assert entries[0] == NUM_TOKENS * (1 + NUM_TOP), "each was written as it came"
    before = entries[0]
    assert made.feed(0, [B], LENGTH, 0, rows([B])).status == 200
    assert entries[0] - before == 1 + NUM_TOP


@pytest.mark.parametrize("route", [*ROUTES, Route.MESSAGES])
def test_a_plain_answer_gathers_no_objects(route: Route) -> None:
    """The process looked for garbage among several for each token, half a second at a time."""
    fields = {} if route == Route.MESSAGES else {"num_logprobs": NUM_TOP, "return_token_ids": True}
    made = Responder(VOCABULARY, context(route=route, stream=False, more_fields=b'{"x":1}', **fields))
    made.feed(0, [A], RUNNING, 0, rows([A]))
    gc.freeze()  # what other tests have imported need not be looked through again and again
    try:
        before = num_objects()
        for _ in range(NUM_TOKENS):
            made.feed(0, [A], RUNNING, 0, rows([A]))
        assert num_objects() - before < NUM_TOKENS / 10
    finally:
        gc.unfreeze()


def num_objects() -> int:
    gc.collect()
    return len(gc.get_objects())
