from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from tests.property.detokenizer.test_respond import RUNNING, VOCABULARY, requests, rows_of
from tokservice.detokenizer.respond import Fed, Responder
from tokservice.detokenizer.turns import Step, Turns
from tokservice.wire.messages import FinishReason

Steps = list[tuple[int, list[int], FinishReason]]
any_request = requests(stream=True) | requests(stream=False)


def told(feds: Sequence[Fed]) -> list[Fed]:
    """With the data as bytes, and without those of which nothing came."""
    feds = [fed._replace(data=bytes(fed.data)) for fed in feds]
    return [fed for fed in feds if fed != Fed(fed.choice)]


def at_once(context: bytes, steps: Steps, cut: int) -> list[Fed]:
    """What comes of a request that is taken over at some step."""
    responder, rest = taken_over(context, steps, cut)
    feds = responder.begin()
    feds += [responder.feed(choice, ids, reason, 0, rows_of(ids)) for choice, ids, reason in rest]
    return told(feds)


def taken_over(context: bytes, steps: Steps, cut: int) -> tuple[Responder, Steps]:
    first = Responder(VOCABULARY, context)
    output_ids: list[list[int]] = [[], []]
    finished = [RUNNING, RUNNING]
    notes = [b"", b""]
    for choice, ids, reason in steps[:cut]:
        fed = first.feed(choice, ids, reason, 0, rows_of(ids))
        output_ids[choice] += ids[: fed.num_consumed]
        finished[choice] = fed.finish_reason or finished[choice]
        notes[choice] += fed.note
    delivered = [len(ids) // 2 for ids in output_ids]
    return Responder(VOCABULARY, context, delivered, finished, output_ids, notes), steps[cut:]


@given(st.lists(any_request, min_size=1, max_size=3), st.data())
def test_turns_change_nothing_in_what_is_said(requests: list[tuple[bytes, Steps]], data: st.DataObject) -> None:
    """However small the slices are, and however the turns of requests come between the steps of others."""
    cuts = [data.draw(st.integers(0, len(steps))) for _, steps in requests]
    expected = [at_once(context, steps, cut) for (context, steps), cut in zip(requests, cuts, strict=True)]
    slice_units, joined_at_once = data.draw(st.integers(1, 20)), data.draw(st.integers(0, 100))
    with (
        patch.multiple("tokservice.detokenizer.slices", SLICE=slice_units, JOINED_AT_ONCE=joined_at_once),
        patch("tokservice.detokenizer.turns.EARLY_TURNS", data.draw(st.integers(1, 4))),
    ):
        turns = Turns()
        feds: list[list[Fed]] = [[] for _ in requests]
        waiting = []
        for (context, steps), cut in zip(requests, cuts, strict=True):
            responder, rest = taken_over(context, steps, cut)
            work = [responder.feeding(choice, ids, reason, 0, rows_of(ids)) for choice, ids, reason in rest]
            waiting.append([Step(responder.beginning()), *map(Step, work)])
        while turns or any(waiting):
            places = [place for place, steps in enumerate(waiting) if steps]
            if places and (not turns or data.draw(st.booleans())):
                place = data.draw(st.sampled_from(places))
                feds[place] += turns.begin(str(place), waiting[place].pop(0))
            else:
                place = int(turns.next_request)
                feds[place] += [fed for _, fed in turns.go_on(str(place))]
    assert list(map(told, feds)) == expected
