"""Kernels of linear layers for any number of rows, by the CPU's matrix unit.

Engine process, CPU. See ``rows.py`` for what a kernel is and ``tiles.py`` for what tiles are. Weights are stored as
panels of 32 columns, (num_panels, in_features / 32, 2) right tiles, so that a thread reads one stretch of memory.
A task is a panel and a block of rows, which stays in a core's cache from one panel to the next. A row's sums run in
one order, whatever rows are computed beside it.
"""

from __future__ import annotations

from engine.torch_core.kernels.language import Address, bfloat_of_float, compiled, floats, halves
from engine.torch_core.kernels.layout import TILE_DEPTH, TILE_ROWS
from engine.torch_core.kernels.rows import silu
from engine.torch_core.kernels.tiles import (
    CONFIGURATION,
    MOST_ROWS,
    PANEL_COLUMNS,
    SUMS,
    TILE,
    add_product,
    configure,
    load_configuration,
    save_configuration,
    scratch,
    start_sums,
    store_sums,
)


@compiled
def tile_linear(
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
    """output (num_rows, 32 num_panels) float32 = x (num_rows, in_features) bfloat16 times weights, + bias float32.

    bias (32 num_panels,); row_block: a multiple of 32.
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
        start_sums(count, bias + panel * PANEL_COLUMNS * 4)
        place = x + row * in_features * 2
        add_product(count, depth, place, in_features * 2, weights + panel * depth * 2 * TILE, row == lo)
        result = output + (row * num_panels + panel) * PANEL_COLUMNS * 4
        store_sums(count, result, num_panels * PANEL_COLUMNS * 4)
    load_configuration(others)


@compiled
def tile_gate(
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
    """output (num_rows, 16 num_panels) bfloat16 = silu(gate x) * (up x): a panel has 16 columns of each.

    See ``tile_linear``.
    """
    others = scratch(CONFIGURATION)
    save_configuration(others)
    panel, lo = task % num_panels, task // num_panels * row_block
    hi = min(lo + row_block, num_rows)
    depth = in_features // TILE_DEPTH
    sums_at = scratch(SUMS)
    configured = 0
    for row in range(lo, hi, MOST_ROWS):
        count = min(hi - row, MOST_ROWS)
        if count != configured:
            configure(count)
            configured = count
        start_sums(count, bias + panel * PANEL_COLUMNS * 4)
        place = x + row * in_features * 2
        add_product(count, depth, place, in_features * 2, weights + panel * depth * 2 * TILE, row == lo)
        store_sums(count, sums_at, PANEL_COLUMNS * 4)
        for i in range(count):
            gates_and_ups = floats(sums_at + i * PANEL_COLUMNS * 4, (2, TILE_ROWS))
            result = halves(output + ((row + i) * num_panels + panel) * TILE_ROWS * 2, (TILE_ROWS,))
            for j in range(TILE_ROWS):
                result[j] = bfloat_of_float(silu(gates_and_ups[0, j]) * gates_and_ups[1, j])
    load_configuration(others)
