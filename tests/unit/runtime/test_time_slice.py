"""A short time slice, as the kernel tells it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tokservice.runtime.time_slice import SHORT_US

TELL = """
import ctypes, os, platform, threading
from tokservice.runtime.time_slice import _ATTRIBUTES, _SCHED_SETATTR, shorten_time_slice

def tell():
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    assert ctypes.CDLL(None).syscall(_SCHED_SETATTR[platform.machine()] + 1, 0, buffer, _ATTRIBUTES.size, 0) == 0
    _, policy, _, nice, _, slice_ns, _, _ = _ATTRIBUTES.unpack(buffer.raw)
    print(policy, nice, slice_ns)

os.nice({nice})
tell()
{change}
shorten_time_slice()
tell()
thread = threading.Thread(target=tell)
thread.start()
thread.join()
"""


def told(nice: int, change: str = "") -> list[list[int]]:
    """Policy, nice and slice in nanoseconds: before, after, and of a thread that was started then."""
    command = [sys.executable, "-c", TELL.format(nice=nice, change=change)]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return [[int(word) for word in line.split()] for line in text.splitlines()]


@pytest.mark.skipif(sys.platform != "linux", reason="slices of Linux")
@pytest.mark.parametrize("nice", [0, 3])
def test_the_slice_is_short_and_all_else_as_it_was(nice: int) -> None:
    before, after, of_a_thread = told(nice)
    if not before[2]:
        pytest.skip("a kernel before 6.12: slices are not to be set")
    assert before[:2] == after[:2]
    assert before[2] > after[2] == SHORT_US * 1000
    assert of_a_thread == after


@pytest.mark.skipif(sys.platform != "linux", reason="slices of Linux")
def test_another_policy_stays() -> None:
    _, after, _ = told(0, "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))")
    assert after[0] == 3  # SCHED_BATCH
