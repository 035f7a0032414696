"""The engine's compiled kernels, loaded once for all tests of a process."""

from __future__ import annotations

from functools import cache

import pytest

from engine.torch_core.kernels.calls import Kernels
from engine.torch_core.kernels.machine_code import MachineCode, load_kernels
from engine.torch_core.linear import can_bfloat16


def kernels(without_tiles: bool = False) -> Kernels:
    """Computed by as many threads as torch has now; ``without_tiles``: as on a CPU that has no matrix unit."""
    loaded = Kernels(_code())
    loaded.has_tiles &= not without_tiles
    return loaded


def require_tiles() -> None:
    """Skip the test where there are no kernels of the CPU's matrix unit."""
    if not kernels().has_tiles:
        pytest.skip("this CPU has no matrix unit for bfloat16, or the system does not lend it")


def require_bfloat16(without_tiles: bool = False) -> None:
    """Skip the test where weights cannot be bfloat16."""
    if not can_bfloat16(kernels(without_tiles)):
        pytest.skip("there is no code to multiply bfloat16 by this CPU")


@cache
def _code() -> MachineCode:
    return load_kernels()
