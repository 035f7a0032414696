"""Kernel of a linear layer for a few rows: one reading of the weights, without a pause.

Engine process, CPU. See ``rows.py`` for what a kernel is.
"""

from __future__ import annotations

from engine.torch_core.kernels.language import Address, add_product, compiled, floats
from engine.torch_core.kernels.layout import PANEL

AHEAD = 4096  # bytes

_add = add_product(is_half=True)


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
    """output (num_rows, out_features) = x (num_rows, in_features) times weights, + bias; a task is a panel of columns.

    weights (out_features / PANEL, in_features, PANEL) float16: the columns of a panel side by side, so that a thread
    reads one stretch of memory. bias (out_features,).
    """
    offset = task * PANEL * 4
    start = floats(bias + offset, (PANEL,))
    for row in range(num_rows):
        result = floats(output + row * out_features * 4 + offset, (PANEL,))
        for i in range(PANEL):
            result[i] = start[i]
    panel = weights + task * in_features * PANEL * 2
    _add(num_rows, in_features, PANEL, x, in_features * 4, panel, PANEL * 2, output + offset, out_features * 4, AHEAD)
