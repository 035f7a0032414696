"""Threads of an engine on a CPU."""

from __future__ import annotations

import pytest

from engine.threads import num_threads
from tokservice.runtime.config import EngineConfig


@pytest.mark.parametrize(
    ("num_cores", "processes", "threads"),
    [(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 1, 3), (64, 1, 63), (2, 2, 1), (2, 4, 1), (9, 2, 4), (16, 4, 3)],
)
def test_engines_share_what_the_front_end_leaves(num_cores: int, processes: int, threads: int) -> None:
    """Two engines with a thread for each core each took turns on every one of them."""
    assert num_threads(EngineConfig(processes=processes), num_cores) == threads


def test_the_setting_counts_where_there_is_one() -> None:
    assert num_threads(EngineConfig(threads=5, processes=2), 2) == 5
    assert num_threads(EngineConfig(threads=5, deterministic=True), 2) == 4


@pytest.mark.parametrize(("num_cores", "threads"), [(1, 1), (2, 2), (3, 2), (4, 2), (9, 8), (64, 32)])
def test_a_deterministic_engine_takes_a_power_of_two(num_cores: int, threads: int) -> None:
    assert num_threads(EngineConfig(deterministic=True), num_cores) == threads
