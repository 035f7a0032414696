"""What tests of kernels share: random rows, a number of threads, how near a result is."""

from __future__ import annotations

import math
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
