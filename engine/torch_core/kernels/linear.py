"""Kernels of linear layers for any number of rows, by vector registers.

Engine process, CPU. See ``rows.py`` for what a kernel is and ``products.py`` for the products. Weights are stored as
panels of 16 columns, (num_panels, in_features, 16), so that a thread reads one stretch of memory. A task is a panel,
which stays in a core's first cache, and a block of rows, which stays in its second from one panel to the next.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.torch_core.kernels.language import DTYPES, Address, compiled, floats, scratch
from engine.torch_core.kernels.layout import PANEL
from engine.torch_core.kernels.products import block
from engine.torch_core.kernels.rows import silu

AHEAD = 2**18  # bytes at most to what is fetched: it stays in a core's second cache until then
HALF = PANEL // 2
MOST_ROWS = 96  # that one call of ``gate`` finishes at most
GATES_BYTES = MOST_ROWS * HALF * 4


@compiled
def begin(count: int, bias: Address, sums: Address) -> None:
    """sums (count, 16) = bias (16,)."""
    start = floats(bias, (PANEL,))
    for i in range(count):
        total = floats(sums + i * PANEL * 4, (PANEL,))
        for j in range(PANEL):
            total[j] = start[j]


@compiled
def store(count: int, num_panels: int, panel: int, row: int, sums: Address, output: Address) -> None:
    """output (num_rows, 16 num_panels) = sums (count, 16)."""
    for i in range(count):
        source = floats(sums + i * PANEL * 4, (PANEL,))
        result = floats(output + ((row + i) * num_panels + panel) * PANEL * 4, (PANEL,))
        for j in range(PANEL):
            result[j] = source[j]


@compiled
def gate(count: int, num_panels: int, panel: int, row: int, sums: Address, output: Address) -> None:
    """output (num_rows, 8 num_panels) = silu(gates) * ups: sums (count, 2, 8), of both."""
    gates_at, ups_at = scratch(GATES_BYTES), scratch(GATES_BYTES)
    gates, ups = floats(gates_at, (count * HALF,)), floats(ups_at, (count * HALF,))
    for i in range(count):
        gates_and_ups = floats(sums + i * PANEL * 4, (2, HALF))
        for j in range(HALF):
            gates[i * HALF + j] = gates_and_ups[0, j]
            ups[i * HALF + j] = gates_and_ups[1, j]
    for i in range(count * HALF):  # of a loop over 8 columns the compiler makes no vectors
        gates[i] = silu(gates[i]) * ups[i]
    for i in range(count):
        result = floats(output + ((row + i) * num_panels + panel) * HALF * 4, (HALF,))
        for j in range(HALF):
            result[j] = gates[i * HALF + j]


def _kernel(dtype: str, finish: Callable[..., None]) -> Callable[..., None]:
    """``finish`` makes the output of a panel and some rows from their sums."""
    _, width, _ = DTYPES[dtype]
    rows_and_panel = block(PANEL, dtype)
    most_rows, add = rows_and_panel.most_rows, rows_and_panel.add
    sums_size = most_rows * PANEL * 4

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
        panel, lo = task % num_panels, task // num_panels * row_block
        count, x_stride, stride = min(num_rows - lo, row_block), in_features * 4, PANEL * width
        matrix, sums = weights + panel * in_features * stride, scratch(sums_size)
        num_blocks = (count + most_rows - 1) // most_rows
        # The next panel is fetched in equal parts each time that this one is read.
        fetched, fetch_stride = matrix + min(in_features * stride, AHEAD), stride // num_blocks
        for index in range(num_blocks):
            row = lo + count * index // num_blocks
            rows = lo + count * (index + 1) // num_blocks - row
            begin(rows, bias + panel * PANEL * 4, sums)
            left = x + row * x_stride
            add(rows, in_features, left, x_stride, matrix, stride, sums, PANEL * 4, fetched, fetch_stride)
            fetched += in_features * fetch_stride
            finish(rows, num_panels, panel, row, sums, output)

    kernel: Callable[..., None] = product
    return kernel


def linear_kernel(dtype: str) -> Callable[..., None]:
    """output (num_rows, 16 num_panels) = sums, of weights of float16 or float32."""
    return _kernel(dtype, store)


def gate_kernel(dtype: str) -> Callable[..., None]:
    """output (num_rows, 8 num_panels) = silu(gates) * ups: a panel has 8 columns of each."""
    return _kernel(dtype, gate)
