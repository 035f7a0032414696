"""Calls of kernels, computed by the threads that compute torch's own operations.

Engine process, CPU. torch's threads wait for work by spinning; a second set of threads beside them would take their
cores. So a call starts the threads of the OpenMP library that torch has loaded, as a ``#pragma omp parallel`` does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.torch_core.kernels.layout import HEADER, MAX_ARGUMENTS
from engine.torch_core.kernels.machine_code import MachineCode
from engine.torch_core.kernels.recording import Call, Recorder, Recording

_TORCH = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"

Kernel = Callable[..., None]  # number of tasks, the kernel's arguments


class Kernels:
    """The kernels, callable. Neither they nor what ``kernel`` returns may be used by two threads at once."""

    def __init__(self, code: MachineCode) -> None:
        self._code = code
        self._run = _openmp()  # address of a worker, of its frame, number of threads, 0
        self.has_tiles = code.has_tiles
        self._list_address = code.address("compute_list")
        self._compute_list = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._list_address)
        self._recorder: Recorder | None = None  # None: calls are computed
        self.num_threads = torch.get_num_threads() if self._run else 1  # that compute the tasks of a call

    def empty(self, num_rows: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """For a kernel's results, which nobody needs after the next layer."""
        if self._recorder is not None:
            return self._recorder.empty(num_rows, size, dtype)
        return torch.empty(num_rows, size, dtype=dtype)

    def begin_layer(self) -> None:
        """A layer's calls follow."""
        if self._recorder is not None:
            self._recorder.begin_layer()

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Calls are noted instead of computed."""
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None

    def compute(self, recording: Recording) -> None:
        """Compute its calls, one after the other."""
        recording.begin()
        if recording.num_threads == 1 or self._run is None:
            self._compute_list(recording.address)
        else:
            self._run(self._list_address, recording.address, recording.num_threads, 0)

    def kernel(self, name: str, share_from: int, runs: int = 0) -> Kernel:
        """By its name; fewer tasks than ``share_from`` are not worth waking the other threads.

        A thread that is free takes the next run of tasks: there are ``runs`` for each thread, or each task is one.
        With one run rows stay in the cache of a core from call to call; with more, a thread that has lost its core for
        a while is helped by the others.
        """
        address = self._code.address(name)
        work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        frame = (ctypes.c_int64 * (HEADER + MAX_ARGUMENTS))()
        at = ctypes.addressof(frame)

        def call(num_tasks: int, *arguments: int) -> None:  # holds self, and so the code
            num_threads = self.num_threads if num_tasks >= share_from else 1
            num_runs = min(num_tasks, runs * num_threads) if runs else num_tasks
            values: list[Any] = [0, 0, num_tasks, num_runs, 0, *arguments]
            if self._recorder is not None:
                self._recorder.calls.append(Call(name, address, num_threads, values))
                return
            frame[: HEADER + len(arguments)] = values
            if num_threads == 1 or self._run is None:
                work(at)
            else:
                self._run(address, at, num_threads, 0)  # never fewer: GNU's ends the others, and starts them anew later

        return call


def _openmp() -> Any:
    """``GOMP_parallel`` of the OpenMP library that torch brings, GNU's or LLVM's; None where there is none."""
    try:
        run = ctypes.CDLL(str(_TORCH)).GOMP_parallel  # found in what this library needs
    except (OSError, AttributeError):
        return None
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    run.restype = None
    return run
