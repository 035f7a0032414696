"""What tests of kernels share: random rows, weights of int8, a number of threads, how near a result is, memory that
ends.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from hypothesis import strategies as st
from torch import Tensor

SEEDS = st.integers(0, 2**32)
BAD = st.sampled_from([math.nan, math.inf, -math.inf])


def random(seed: int) -> Callable[..., Tensor]:
    """``normal(*shape)``, float32."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def rounded_to_int8(weight: Tensor) -> Tensor:
    """What weights (out_features, in_features) float32 of int8 stand for: 8 bits, times a bfloat16 for 32 of a row."""
    parts = []
    for group in weight.split(32, dim=1):
        scales = (group.abs().amax(dim=1, keepdim=True) / 127).bfloat16().float()
        parts.append(scales * torch.where(scales > 0, group / scales, 0).round().clamp(-127, 127))
    return torch.cat(parts, dim=1)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many that compute, until the end of the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_near(
    x: Tensor, exact: Tensor, relative: float, absolute: float | Tensor = 0.0, dtype: torch.dtype = torch.float32
) -> None:
    """exact: float64, finite."""
    assert x.dtype is dtype
    assert x.shape == exact.shape
    assert x.isfinite().all()
    assert ((x.double() - exact).abs() <= relative * exact.abs() + absolute).all()


def at_an_end(tensor: Tensor) -> Tensor:
    """A copy, behind which the process may not even read."""
    num_bytes = tensor.numel() * tensor.itemsize
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=size - num_bytes)
    behind = ctypes.c_void_p(copy.data_ptr() + num_bytes)
    assert ctypes.CDLL(None).mprotect(behind, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return copy.view(tensor.shape).copy_(tensor)
