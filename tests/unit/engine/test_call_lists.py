"""Lists of kernels' calls, computed by threads that come late, go away, or are more than the cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.torch_core.kernels.calls import Kernels
from engine.torch_core.kernels.layout import CALLS, DONE_RUNS, NEXT_ROLE, NUM_CALLS, NUM_RUNS
from engine.torch_core.kernels.recording import Recorder, Recording
from engine.torch_core.packed_linear import PackedLinear
from tests.helpers.kernel_checks import random, threads
from tests.helpers.loaded_kernels import kernels

SIZE, NUM_ROWS = 96, 20
DEPTH = 60  # calls of a list, each of which reads what the last one wrote


class Chain:
    """x -> x @ weight / norm, over and over: a wrong order, or a run left out or computed twice, changes the result."""

    def __init__(self, loaded: Kernels) -> None:
        self.kernels = loaded
        self._recorder = Recorder(NUM_ROWS)  # whose memory the calls use
        normal = random(3)
        self.x = normal(NUM_ROWS, SIZE)
        weight = normal(SIZE, SIZE)
        self._linear = PackedLinear(weight / torch.linalg.matrix_norm(weight, 2) * 1.4, None, loaded, torch.float32)

    def _apply(self) -> Tensor:
        x = self.x
        for _ in range(DEPTH):
            x = self._linear(x)
        return x

    def expected(self) -> Tensor:
        return self._apply()

    def recorded(self) -> tuple[Recording, Tensor]:
        with self.kernels.recording(self._recorder):
            result = self._apply()
        return Recording(self._recorder.calls, ()), result


@contextmanager
def hog() -> Iterator[None]:
    """Another process that wants a core for itself."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_list_gives_what_its_calls_give(count: int) -> None:
    with threads(count):
        chain = Chain(kernels())
        expected = chain.expected()
        recording, result = chain.recorded()
        assert recording.num_threads == count
        for _ in range(300):
            result.zero_()
            chain.kernels.compute(recording)
            assert torch.equal(result, expected)


def test_noting_a_call_does_not_compute_it() -> None:
    recording, result = Chain(kernels()).recorded()
    assert not result.any()
    assert len(recording._calls) == DEPTH


def test_beside_other_load() -> None:
    with threads(3), hog(), hog():
        chain = Chain(kernels())
        expected = chain.expected()
        recording, result = chain.recorded()
        for _ in range(50):
            result.zero_()
            chain.kernels.compute(recording)
            assert torch.equal(result, expected)


def test_a_thread_that_comes_alone_computes_all() -> None:
    """It waits for nobody who has begun nothing; who comes when all is over finds nothing to do."""
    with threads(2):
        chain = Chain(kernels())
        expected = chain.expected()
        recording, result = chain.recorded()
        recording.begin()
        chain.kernels._compute_list(recording.address)
        assert torch.equal(result, expected)
        result.zero_()
        chain.kernels._compute_list(recording.address)
        assert not result.any()


def test_each_run_is_counted_once() -> None:
    with threads(4):
        recording, _ = (chain := Chain(kernels())).recorded()
        for _ in range(20):
            chain.kernels.compute(recording)
            assert (recording._frames[:, DONE_RUNS] == recording._frames[:, NUM_RUNS]).all()
            assert recording._state[NEXT_ROLE] == 4  # all threads were there
        assert recording._state[NUM_CALLS] == DEPTH
        assert recording._state[CALLS] == recording._calls.ctypes.data
        assert np.unique(recording._frames[:, NUM_RUNS]).tolist() != [1]


HELD = """
import sys, torch
torch.set_num_threads(2)
from tests.helpers.loaded_kernels import kernels
from tests.unit.engine.test_call_lists import Chain
chain = Chain(kernels())
expected = chain.expected()
recording, result = chain.recorded()
print("ready", flush=True)
for line in sys.stdin:
    result.zero_()
    chain.kernels.compute(recording)
    print(torch.equal(result, expected), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="signals of single processes")
def test_a_process_that_is_stopped_and_goes_on_is_right() -> None:
    """Threads stand still anywhere, also with a run begun, and for longer than any wait spins."""
    with subprocess.Popen(
        [sys.executable, "-c", HELD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            for _ in range(30):
                process.stdin.write("\n")
                process.stdin.flush()
                for _ in range(3):
                    os.kill(process.pid, signal.SIGSTOP)
                    time.sleep(0.001)  # it stands still that long
                    os.kill(process.pid, signal.SIGCONT)
                assert process.stdout.readline() == "True\n"
        finally:
            process.stdin.close()
            process.kill()
