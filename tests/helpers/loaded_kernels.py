"""The engine's compiled kernels, loaded once for all tests of a process."""

from __future__ import annotations

from functools import cache

from engine.torch_core.kernels.calls import Kernels
from engine.torch_core.kernels.machine_code import MachineCode, load_kernels


def kernels() -> Kernels:
    """Computed by as many threads as torch has now."""
    return Kernels(_code())


@cache
def _code() -> MachineCode:
    return load_kernels()
