"""Kernel of a linear layer: one reading of the weights, without a pause, for each four rows.

Engine process, CPU. See ``rows.py`` for what a kernel is.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.torch_core.kernels.language import DTYPES, Address, add_product, compiled, floats
from engine.torch_core.kernels.layout import PANEL

AHEAD = 4096  # bytes


def linear_kernel(dtype: str) -> Callable[..., None]:
    """For weights of float16 or float32."""
    _, width, _ = DTYPES[dtype]
    add = add_product(dtype == "float16")

    @compiled
    def linear(
        task: int,
        slot: int,
        num_rows: int,
        in_features: int,
        out_features: int,
        weights: Address,
        bias: Address,
        x: Address,
        output: Address,
    ) -> None:
        """output (num_rows, out_features) = x (num_rows, in_features) times weights, + bias.

        A task is a panel of columns. weights (out_features / PANEL, in_features, PANEL): the columns of a panel side by
        side, so that a thread reads one stretch of memory. bias (out_features,).
        """
        offset = task * PANEL * 4
        start = floats(bias + offset, (PANEL,))
        for row in range(num_rows):
            result = floats(output + row * out_features * 4 + offset, (PANEL,))
            for i in range(PANEL):
                result[i] = start[i]
        panel, stride = weights + task * in_features * PANEL * width, PANEL * width
        sums, x_stride, sums_stride = output + offset, in_features * 4, out_features * 4
        add(num_rows, in_features, PANEL, x, x_stride, panel, stride, sums, sums_stride, AHEAD)

    kernel: Callable[..., None] = linear
    return kernel
