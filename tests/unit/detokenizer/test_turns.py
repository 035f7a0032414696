from __future__ import annotations

from collections.abc import Iterator

import pytest

from tokservice.detokenizer.respond import Fed
from tokservice.detokenizer.turns import EARLY_TURNS, STEPS_AT_ONCE, Step, Turns
from tokservice.wire.errors import WireError


def step(choice: int, num_slices: int) -> Step:
    """Its Fed comes in the last of so many slices."""

    def work() -> Iterator[Fed | None]:
        for _ in range(num_slices - 1):
            yield None
        yield Fed(choice)

    return Step(work())


def told(turns: Turns) -> list[tuple[str, list[int]]]:
    """Turns, until nobody waits: whose each was, and the choices that something came of."""
    found = []
    while turns:
        request_id = turns.next_request
        found.append((request_id, [fed.choice for _, fed in turns.go_on(request_id)]))
    return found


def test_short_steps_are_done_at_once() -> None:
    turns = Turns()
    assert [turns.begin("a", step(choice, 1)) for choice in (1, 2)] == [[Fed(1)], [Fed(2)]]
    assert not turns
    assert "a" not in turns


def test_requests_take_turns_slice_by_slice() -> None:
    turns = Turns()
    assert turns.begin("a", step(1, 3)) == turns.begin("b", step(2, 4)) == []
    assert turns.begin("c", step(3, 1)) == [Fed(3)], "whoever has something short does not wait"
    assert told(turns) == [("a", []), ("b", []), ("a", [1]), ("b", []), ("b", [2])]


def test_steps_of_a_request_keep_their_order() -> None:
    """However short those are that come behind a long one."""
    turns = Turns()
    for choice, num_slices in ((1, 3), (2, 1), (3, 2), (4, 1)):
        assert turns.begin("a", step(choice, num_slices)) == []
    turns.begin("b", step(5, 2))
    assert turns.num_steps == 5
    assert told(turns) == [("a", []), ("b", [5]), ("a", [1, 2]), ("a", [3, 4])]
    assert turns.num_steps == 0


def test_what_waited_behind_a_long_step_is_no_long_turn() -> None:
    turns = Turns()
    turns.begin("a", step(0, 2))
    for choice in range(1, 3 * STEPS_AT_ONCE):
        turns.begin("a", step(choice, 1))
    turns.begin("b", step(99, 3))
    results = told(turns)
    assert [request_id for request_id, _ in results] == ["a", "b", "a", "b", "a"]
    assert [choice for _, choices in results for choice in choices if choice != 99] == list(range(3 * STEPS_AT_ONCE))


def test_what_takes_many_turns_is_done_one_after_the_other() -> None:
    """All answers were written at once: they filled the memory, and the first was done no sooner than the last."""
    turns = Turns()
    num_slices = 3 * EARLY_TURNS
    for place, request_id in enumerate("abc"):
        turns.begin(request_id, step(place, num_slices))
    order = "".join(request_id for request_id, _ in told(turns))
    num_late = num_slices - 1 - EARLY_TURNS
    assert order.startswith("abc" * (EARLY_TURNS - 1))
    assert order.endswith("b" * num_late + "c" * num_late)


def test_what_takes_a_few_turns_does_not_wait_for_what_takes_many() -> None:
    turns = Turns()
    for place, request_id in enumerate("ab"):
        turns.begin(request_id, step(place, 10 * EARLY_TURNS))
    for _ in range(4 * EARLY_TURNS):
        turns.go_on(turns.next_request)
    turns.begin("c", step(2, 4))
    turns.begin("d", step(3, 3))
    order = "".join(request_id for request_id, _ in told(turns))
    assert order.replace("a", "").startswith("cdcdc")
    assert order.startswith(("acadacadac", "cadacadaca"))
    assert turns.begin("c", step(4, 1)) == [Fed(4)]


def test_a_request_that_is_dropped_is_never_heard_of_again() -> None:
    turns = Turns()
    turns.begin("a", step(1, 3))
    turns.begin("a", step(2, 1))
    turns.begin("b", step(3, 2))
    turns.drop("a")
    turns.drop("unknown")
    assert told(turns) == [("b", [3])]
    assert turns.begin("a", step(4, 1)) == [Fed(4)]


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    def work() -> Iterator[Fed | None]:
        yield None
        raise WireError("malformed")

    turns = Turns()
    turns.begin("a", Step(work()))
    turns.begin("a", step(1, 1))
    turns.begin("b", step(2, 2))
    with pytest.raises(WireError):
        turns.go_on("a")
    assert told(turns) == [("b", [2])]
