"""When a process that ended is started again."""

from __future__ import annotations

import itertools

from tokservice.runtime.restart import CRASH_LOOP_DEATHS, LONGEST_PAUSE_S, RestartPolicy


def test_after_useful_work_at_once_however_often() -> None:
    policy = RestartPolicy()
    assert [policy.pause_after_death_s(did_work=True) for _ in range(50)] == [0.0] * 50
    assert not policy.is_crash_loop


def test_without_any_work_the_pauses_grow_up_to_a_limit() -> None:
    policy = RestartPolicy()
    pauses = [policy.pause_after_death_s(did_work=False) for _ in range(20)]
    assert pauses[0] == 0.0
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S
    assert all(later <= 2 * earlier for earlier, later in itertools.pairwise(pauses[1:]))


def test_a_crash_loop_counts_only_deaths_without_work() -> None:
    policy = RestartPolicy()
    for _ in range(CRASH_LOOP_DEATHS - 1):
        policy.pause_after_death_s(did_work=False)
    assert not policy.is_crash_loop
    policy.pause_after_death_s(did_work=False)
    assert policy.is_crash_loop
    policy.pause_after_death_s(did_work=True)
    assert not policy.is_crash_loop


def test_it_can_go_on_for_days() -> None:
    """The pause was a power of two that overflowed after a thousand deaths, and ended the launcher."""
    policy = RestartPolicy()
    assert max(policy.pause_after_death_s(did_work=False) for _ in range(5000)) == LONGEST_PAUSE_S
