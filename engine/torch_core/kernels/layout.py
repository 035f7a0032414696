"""What kernels and their callers agree on. Engine process; imports nothing, since callers do without numba."""

from __future__ import annotations

HEADER = 4  # fields of a frame before a kernel's arguments: next task, next thread, number of tasks, tasks at a time
NUM_TASKS = 2  # place of the third
MAX_ARGUMENTS = 20
PANEL = 64  # columns of a linear layer that are stored side by side, and computed as one task
TILE_ROWS = 16  # of a matrix unit; also the columns of its results
TILE_DEPTH = 32  # bfloat16 of a row; what a product of tiles sums up
QUERY_BLOCK = 64  # prompt tokens whose attention is one task


def attend_tiles_bytes(group: int, head_dim: int, block_size: int) -> int:
    """What a thread needs to attend: queries, results and statistics, a block's keys and values, scores, weights."""
    num_rows = group * QUERY_BLOCK
    return num_rows * (6 * head_dim + 8) + 4 * block_size * head_dim + 6 * 2 * TILE_ROWS * block_size
