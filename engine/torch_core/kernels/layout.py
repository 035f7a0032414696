"""What kernels and their callers agree on. Engine process; imports nothing, since callers do without numba."""

from __future__ import annotations

NEXT_RUN, NEXT_THREAD, NUM_TASKS, NUM_RUNS, DONE_RUNS = range(5)  # fields of a frame, int64
HEADER = 5  # of these, before a kernel's arguments
MAX_ARGUMENTS = 19
CALL = 3  # int64 of a call in a list: addresses of worker and frame, number of threads
STATE = 20  # int64 of a list while it is computed; those that threads write, and read meanwhile, on lines of their own
NEXT_ROLE, TICKET, CALLS, NUM_CALLS, NAP = 0, 8, 16, 17, 18
PANEL = 16  # columns of a linear layer that are stored side by side, and computed as one task
GROUP = 32  # rows of a panel of int8 that have their scales in common, one for each column
GROUP_BYTES = PANEL * (2 + GROUP)  # of the scales, bfloat16, and the rows behind them
TILE_ROWS = 16  # of a matrix unit; also the columns of its results
TILE_PANEL = 2 * TILE_ROWS  # such columns for the matrix unit
TILE_DEPTH = 32  # bfloat16 of a row; what a product of tiles sums up
QUERY_BLOCK = 64  # prompt tokens whose attention is one task
QUERY_ROWS = 12  # of these, that vector registers compute at once


def attend_bytes(group: int, head_dim: int, block_size: int) -> int:
    """What a thread needs to attend in float32: queries, results and statistics, scores."""
    return 4 * (group * QUERY_BLOCK * (2 * head_dim + 2) + QUERY_ROWS * block_size)


def attend_tiles_bytes(group: int, head_dim: int, block_size: int) -> int:
    """By tiles: queries, results and statistics, a block's keys and values, scores, weights."""
    num_rows = group * QUERY_BLOCK
    return num_rows * (6 * head_dim + 8) + 4 * block_size * head_dim + 6 * 2 * TILE_ROWS * block_size
