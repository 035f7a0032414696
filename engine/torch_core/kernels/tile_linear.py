"""Kernels of linear layers for any number of rows, by the CPU's matrix unit.

Engine process, CPU. See ``rows.py`` for what a kernel is and ``tiles.py`` for what tiles are. Weights are stored as
panels of 32 columns, (num_panels, in_features / 32, 2) right tiles, so that a thread reads one stretch of memory.
A task is a panel and a block of rows, which stays in a core's cache from one panel to the next. A row's sums run in
one order, whatever rows are computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.torch_core.kernels.language import Address, bfloat_of_float, compiled, floats, halves, scratch
from engine.torch_core.kernels.layout import TILE_DEPTH, TILE_PANEL, TILE_ROWS
from engine.torch_core.kernels.rows import silu
from engine.torch_core.kernels.tiles import (
    CONFIGURATION,
    MOST_ROWS,
    SUMS,
    TILE,
    add_product,
    configure,
    load_configuration,
    load_sums,
    save_configuration,
    store_sums,
)


@compiled
def _store(count: int, num_panels: int, panel: int, row: int, output: Address) -> None:
    """output (num_rows, 32 num_panels) float32."""
    stride = num_panels * TILE_PANEL * 4
    store_sums(count, output + row * stride + panel * TILE_PANEL * 4, stride)


@compiled
def _gate(count: int, num_panels: int, panel: int, row: int, output: Address) -> None:
    """output (num_rows, 16 num_panels) bfloat16 = silu(gates) * ups: a panel has 16 columns of each."""
    sums = scratch(SUMS)
    store_sums(count, sums, TILE_PANEL * 4)
    for i in range(count):
        gates_and_ups = floats(sums + i * TILE_PANEL * 4, (2, TILE_ROWS))
        result = halves(output + ((row + i) * num_panels + panel) * TILE_ROWS * 2, (TILE_ROWS,))
        for j in range(TILE_ROWS):
            result[j] = bfloat_of_float(silu(gates_and_ups[0, j]) * gates_and_ups[1, j])


def _kernel(finish: Callable[..., None]) -> Callable[..., None]:
    """``finish`` makes the output of a panel and up to 32 rows from their sums."""

    @compiled
    def product(
        task: int,
        slot: int,
        num_rows: int,
        in_features: int,
        num_panels: int,
        row_block: int,
        weights: Address,
        bias: Address,
        x: Address,
        output: Address,
    ) -> None:
        """Sums = x (num_rows, in_features) bfloat16 times weights, + bias (32 num_panels,) float32.

        row_block: of a task, a multiple of 32.
        """
        others = scratch(CONFIGURATION)
        save_configuration(others)
        panel, lo = task % num_panels, task // num_panels * row_block
        hi = min(lo + row_block, num_rows)
        depth = in_features // TILE_DEPTH
        configured = 0
        for row in range(lo, hi, MOST_ROWS):
            count = min(hi - row, MOST_ROWS)
            if count != configured:
                configure(count)
                configured = count
            load_sums(count, bias + panel * TILE_PANEL * 4, 0)
            left, right = x + row * in_features * 2, weights + panel * depth * 2 * TILE
            add_product(count, depth, left, in_features * 2, right, row == lo)
            finish(count, num_panels, panel, row, output)
        load_configuration(others)

    kernel: Callable[..., None] = product
    return kernel


tile_linear = _kernel(_store)
tile_gate = _kernel(_gate)
