"""Kernels of linear layers of int8, for any number of rows: those of float32 from a quarter of the bytes.

Engine process, CPU. See ``linear.py``, and ``layout.py`` for how weights are stored. A weight is its number times its
scale, rounded to float32; results are bitwise those of ``linear.py`` for such weights. For a few rows, which wait for
memory, weights become float32 in registers; for more, some rows of a panel at a time do so in a core's first cache.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.torch_core.kernels.language import Address, compiled, scratch
from engine.torch_core.kernels.layout import GROUP, GROUP_BYTES, PANEL
from engine.torch_core.kernels.linear import AHEAD, MOST_ROWS, begin, gate, store
from engine.torch_core.kernels.products import block, widening

DEPTH = 8 * GROUP  # rows of a panel that are float32 at a time

_widen = widening(PANEL)


def _kernel(finish: Callable[..., None]) -> Callable[..., None]:
    """``finish`` makes the output of a panel and some rows from their sums."""
    in_registers, in_cache = block(PANEL, "int8"), block(PANEL, "float32")
    most_rows, add, add_wide = in_registers.most_rows, in_registers.add, in_cache.add
    sums_size, wide_size = MOST_ROWS * PANEL * 4, DEPTH * PANEL * 4

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
        """Sums = x (num_rows, in_features) times weights, + bias (16 num_panels,). row_block: rows of a task."""
        panel, first = task % num_panels, task // num_panels * row_block
        end, x_stride = min(num_rows, first + row_block), in_features * 4
        size = (in_features + GROUP - 1) // GROUP * GROUP_BYTES
        matrix, sums, wide = weights + panel * size, scratch(sums_size), scratch(wide_size)
        # The next panel is fetched in equal parts each time that this one is read.
        num_blocks = (end - first + most_rows - 1) // most_rows
        fetched, fetch_stride = matrix + min(size, AHEAD), size // in_features // num_blocks + 1
        for lo in range(first, end, MOST_ROWS):
            count = min(end - lo, MOST_ROWS)
            begin(count, bias + panel * PANEL * 4, sums)
            num_blocks = (count + most_rows - 1) // most_rows
            if num_blocks == 1:
                left = x + lo * x_stride
                add(count, in_features, left, x_stride, matrix, PANEL, sums, PANEL * 4, fetched, fetch_stride)
            else:
                for part in range(0, in_features, DEPTH):
                    depth = min(DEPTH, in_features - part)
                    _widen(depth, matrix + part // GROUP * GROUP_BYTES, wide)
                    for index in range(num_blocks):
                        row = count * index // num_blocks
                        rows = count * (index + 1) // num_blocks - row
                        left, result = x + (lo + row) * x_stride + part * 4, sums + row * PANEL * 4
                        add_wide(rows, depth, left, x_stride, wide, PANEL * 4, result, PANEL * 4, fetched, fetch_stride)
                        fetched += depth * fetch_stride
            finish(count, num_panels, panel, lo, sums, output)

    kernel: Callable[..., None] = product
    return kernel


int8_linear = _kernel(store)
int8_gate = _kernel(gate)
