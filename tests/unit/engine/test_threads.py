"""Threads of an engine on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.threads import num_threads
from tests.helpers.loaded_kernels import require_bfloat16
from tests.helpers.tiny_models import make_engine, request, run_alone, save_tiny_model
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


def greedy_ids(model_dir: Path) -> list[int]:
    engine = make_engine(model_dir, weight_format="bfloat16", threads=2)
    return run_alone(engine, request("r", range(2, 90), temperature=0.0, max_tokens=8, ignore_eos=True))


def test_fewer_threads_than_asked_for_are_not_granted(tmp_path: Path) -> None:
    """By the environment's leave oneDNN got one thread of two, and left half of its results as they were."""
    require_bfloat16()
    model_dir = save_tiny_model("llama3", tmp_path)  # of heads that are too small for the matrix unit
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from pathlib import Path\n"
        "from tests.unit.engine.test_threads import greedy_ids\n"
        f"print(greedy_ids(Path({str(model_dir)!r})))\n"
    )
    environment = os.environ | {"OMP_DYNAMIC": "true", "OMP_THREAD_LIMIT": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == f"{greedy_ids(model_dir)}\n"
