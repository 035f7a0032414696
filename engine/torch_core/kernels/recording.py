"""The calls of a step's kernels as a list, to compute them at once, and again from other inputs.

Engine process, CPU. See ``recorded_steps.py``.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from engine.torch_core.kernels.layout import (
    CALL,
    CALLS,
    HEADER,
    MAX_ARGUMENTS,
    NAP,
    NEXT_ROLE,
    NUM_CALLS,
    NUM_RUNS,
    NUM_TASKS,
    STATE,
    TICKET,
)

_USLEEP = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value or 0


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a kernel."""

    name: str
    address: int  # of the worker
    num_threads: int
    frame: list[int]


class Recorder:
    """Notes calls, and lends memory that stays where it is, the same to all layers.

    A layer's last result is still there when the next layer begins: nothing else has its place.
    """

    def __init__(self, most_rows: int) -> None:
        self.calls: list[Call] = []
        self._most_rows = most_rows
        self._buffers: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._next = count()

    def begin(self) -> None:
        """A step of at most ``most_rows`` rows follows."""
        self.calls = []

    def begin_layer(self) -> None:
        """See ``Kernels.begin_layer``."""
        self._next = count()

    def empty(self, num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
        """See ``Kernels.empty``."""
        key = (next(self._next), size, dtype)
        if key not in self._buffers:  # not by torch, whose operations are watched while a step is recorded
            memory = mmap.mmap(-1, self._most_rows * size * dtype.itemsize)
            self._buffers[key] = torch.frombuffer(memory, dtype=dtype).view(self._most_rows, size)
        return self._buffers[key][:num_rows]


class Recording:
    """Calls for ``Kernels.compute``, which can be prepared for other inputs."""

    def __init__(self, calls: Sequence[Call], inputs: Sequence[int]) -> None:
        """``inputs``: the addresses among the arguments that change from step to step, all different."""
        frames = np.zeros((len(calls), HEADER + MAX_ARGUMENTS), np.int64)
        for frame, call in zip(frames, calls, strict=True):
            frame[: len(call.frame)] = call.frame
        self._frames = frames
        self._flat = frames.reshape(-1)
        self._places = [np.flatnonzero(self._flat == address) for address in inputs]
        self._names = np.array([call.name for call in calls])
        workers = (
            (call.address, frame.ctypes.data, call.num_threads) for call, frame in zip(calls, frames, strict=True)
        )
        self._calls = np.array(list(workers), np.int64).reshape(-1, CALL)
        self._state = np.zeros(STATE, np.int64)
        self._state[[CALLS, NUM_CALLS, NAP]] = self._calls.ctypes.data, len(calls), _USLEEP
        self.num_threads = max(call.num_threads for call in calls)
        self.address = self._state.ctypes.data

    def begin(self) -> None:
        """Its calls are to be computed, by any number of threads that call ``compute_list`` with its address."""
        self._state[[NEXT_ROLE, TICKET]] = 0

    def prepare(self, inputs: Sequence[int], num_tasks: Mapping[str, int]) -> None:
        """Replace the inputs, and by their names the numbers of tasks of some kernels that take them one by one."""
        for places, address in zip(self._places, inputs, strict=True):
            self._flat[places] = address
        for name, number in num_tasks.items():
            self._frames[self._names == name, NUM_TASKS : NUM_RUNS + 1] = number  # each is a run
