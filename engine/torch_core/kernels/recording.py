"""The calls of a step's kernels as a list, to compute it again from other inputs without Python between the calls.

Engine process, CPU; pure. Python takes some 10 us for each of 300 calls of a step of 13 ms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from engine.torch_core.kernels.layout import HEADER, MAX_ARGUMENTS

NUM_TASKS = 2  # place in a frame
TURNS = 2  # a layer reads what the one before has computed, and no earlier one


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a kernel."""

    name: str
    address: int  # of the worker
    num_threads: int
    frame: list[int]


class Recorder:
    """Notes calls, and lends memory that stays where it is: the same for all layers but their neighbours."""

    def __init__(self, most_rows: int) -> None:
        self.calls: list[Call] = []
        self._most_rows = most_rows
        self._buffers: dict[tuple[int, int, int, torch.dtype], Tensor] = {}
        self._layer = 0
        self._next = count()

    def begin(self) -> None:
        """A step of at most ``most_rows`` rows follows."""
        self.calls = []

    def begin_layer(self) -> None:
        """See ``Kernels.begin_layer``."""
        self._layer += 1
        self._next = count()

    def empty(self, num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
        """See ``Kernels.empty``."""
        key = (self._layer % TURNS, next(self._next), size, dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(self._most_rows, size, dtype=dtype)
        return self._buffers[key][:num_rows]


class Recording:
    """Calls that can be repeated by ``Kernels.repeat``."""

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
        self._calls = np.array(list(workers), np.int64)
        self.address = self._calls.ctypes.data
        self.num_calls = len(calls)

    def prepare(self, inputs: Sequence[int], num_tasks: Mapping[str, int]) -> None:
        """Replace the inputs, and the numbers of tasks of some kernels by their names."""
        for places, address in zip(self._places, inputs, strict=True):
            self._flat[places] = address
        for name, number in num_tasks.items():
            self._frames[self._names == name, NUM_TASKS] = number
