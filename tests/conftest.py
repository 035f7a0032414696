"""Settings for all tests."""

from __future__ import annotations

import gc
import os
import resource
import sys
from typing import Any

import pytest
from hypothesis import settings

NUM_FILES = 8192  # a test holds both ends of 2000 connections; the usual limit is 1024

# Before any test imports torch: threads that spin beside other work make a test of two threads ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Tests start hundreds of processes. Where containers forbid it, each would compile all our modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No deadline for one example: a busy machine is not a failure (pytest-timeout bounds the whole test). The same examples
# in every run: what no change has broken must not fail. New ones are for `pytest --hypothesis-profile=extended`.
settings.register_profile("default", deadline=None, derandomize=True)
settings.register_profile("extended", deadline=None, max_examples=3000)
settings.load_profile("default")

_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
if 0 <= _soft < NUM_FILES:
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES if _hard < 0 else min(NUM_FILES, _hard), _hard))


def pytest_collection_finish() -> None:
    """What all test modules have imported, half a million objects, stays: no collection has to go through it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``pytest -n 2``: all of e2e in one process, since its tests share servers, and the tests of any other file."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "e2e" if nodeid.startswith("tests/e2e/") else super()._split_scope(nodeid)

    return Scheduling(config, log)
