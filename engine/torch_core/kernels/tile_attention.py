"""Kernel of the attention of prompt tokens to themselves and to all tokens before, by the CPU's matrix unit.

Engine process, CPU. See ``paged_attention.py`` for the cache and ``tiles.py`` for what tiles are. Block by block of the
context, with a softmax that is corrected as it goes (Dao et al. 2022, FlashAttention). A query's result follows from
its own context alone: it is bitwise the same however a prompt is cut into chunks. Only a value that is NaN also reaches
earlier queries of its task: a weight of 0 times it is NaN.
"""

from __future__ import annotations

import numpy as np

from engine.torch_core.kernels.language import (
    Address,
    bfloat_of_float,
    compiled,
    float_of_half,
    floats,
    halves,
    ints,
    words,
)
from engine.torch_core.kernels.layout import QUERY_BLOCK, TILE_DEPTH, TILE_ROWS, attend_tiles_bytes
from engine.torch_core.kernels.rows import exp, greatest
from engine.torch_core.kernels.tiles import (
    CONFIGURATION,
    MOST_ROWS,
    PANEL_COLUMNS,
    ROW,
    add_product,
    configure,
    load_configuration,
    load_sums,
    save_configuration,
    scratch,
    store_sums,
)

_workspace_bytes = compiled(attend_tiles_bytes)


@compiled
def _arrange(source: Address, num_rows: int, num_columns: int, num_valid: int, target: Address) -> None:
    """target (num_columns / 32, num_rows / 32, 2) right tiles = source (num_rows, num_columns) float16, rounded.

    Rows from ``num_valid`` on count as zeros.
    """
    cells = halves(source, (num_rows, num_columns))
    tiles = words(target, (num_columns // PANEL_COLUMNS, num_rows // TILE_DEPTH, 2, TILE_ROWS, TILE_ROWS))
    for row in range(0, num_rows, 2):
        depth, pair = row // TILE_DEPTH, row % TILE_DEPTH // 2
        for half in range(num_columns // TILE_ROWS):
            column = half * TILE_ROWS
            for i in range(TILE_ROWS):
                first = np.uint32(bfloat_of_float(float_of_half(cells[row, column + i])))
                second = np.uint32(bfloat_of_float(float_of_half(cells[row + 1, column + i])))
                first = first if row < num_valid else np.uint32(0)
                second = second if row + 1 < num_valid else np.uint32(0)
                tiles[half // 2, depth, half % 2, pair, i] = first | (second << np.uint32(16))


@compiled
def _weigh(
    num_rows: int,
    num_seen: int,
    block_size: int,
    head_dim: int,
    scores: Address,
    weights: Address,
    stats: Address,
    totals: Address,
) -> None:
    """weights (num_rows, block_size) bfloat16 = e to the scores, of the same shape, less each row's greatest so far.

    The first row sees ``num_seen`` of them, the next one more. stats (num_rows, 2): the greatest score and the sum of
    weights, brought up to date, as are totals (num_rows, head_dim) where the greatest score has grown.
    """
    for i in range(num_rows):
        stat = floats(stats + i * 2 * 4, (2,))
        score = floats(scores + i * block_size * 4, (block_size,))
        weight = halves(weights + i * block_size * 2, (block_size,))
        seen = min(block_size, max(0, num_seen + i))
        for t in range(seen, block_size):
            score[t] = -np.inf
        top = greatest(score, stat[0])
        added = np.float32(0)
        for t in range(block_size):
            share = exp(score[t] - top)
            score[t] = share
            added += share
        for t in range(seen, block_size):
            score[t] = 0
        for t in range(block_size):
            weight[t] = bfloat_of_float(score[t])
        if top != stat[0]:
            shrink = exp(stat[0] - top)
            total = floats(totals + i * head_dim * 4, (head_dim,))
            for d in range(head_dim):
                total[d] *= shrink
            stat[0] = top
            stat[1] *= shrink
        stat[1] += added


@compiled
def attend_tiles(
    task: int,
    slot: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    num_rows: int,
    start: int,
    row_stride: int,
    blocks: Address,
    queries: Address,
    keys: Address,
    values: Address,
    workspaces: Address,
    output: Address,
) -> None:
    """A block of queries, the heads of one KV head; a task is (block of queries, KV head), the longest first.

    num_rows tokens, of which the first is number ``start`` of its sequence; blocks: of all its tokens, int64. queries
    (num_rows, num_heads, head_dim), row_stride apart; keys, values: the cache of a layer, float16, head_dim and
    block_size multiples of 32. workspaces: ``attend_tiles_bytes`` for each thread. output (num_rows, num_heads,
    head_dim) bfloat16.
    """
    group = num_heads // num_kv_heads
    head = task % num_kv_heads
    lo = ((num_rows + QUERY_BLOCK - 1) // QUERY_BLOCK - 1 - task // num_kv_heads) * QUERY_BLOCK
    num_queries = min(QUERY_BLOCK, num_rows - lo)
    context = start + lo + num_queries
    table = ints(blocks, ((context + block_size - 1) // block_size,))
    block_elements = block_size * head_dim
    lefts = workspaces + slot * _workspace_bytes(group, head_dim, block_size)
    sums = lefts + group * QUERY_BLOCK * head_dim * 2
    stats = sums + group * QUERY_BLOCK * head_dim * 4
    key_tiles = stats + group * QUERY_BLOCK * 2 * 4
    value_tiles = key_tiles + block_elements * 2
    scores = value_tiles + block_elements * 2
    weights = scores + MOST_ROWS * block_size * 4
    scale = np.float32(1 / np.sqrt(head_dim))
    for j in range(group):
        for q in range(num_queries):
            place = j * QUERY_BLOCK + q
            query = floats(queries + ((lo + q) * row_stride + (head * group + j) * head_dim) * 4, (head_dim,))
            left = halves(lefts + place * head_dim * 2, (head_dim,))
            total = floats(sums + place * head_dim * 4, (head_dim,))
            stat = floats(stats + place * 2 * 4, (2,))
            for i in range(head_dim):
                left[i] = bfloat_of_float(query[i] * scale)
                total[i] = 0
            stat[0] = -np.inf  # the greatest score so far
            stat[1] = 0  # the sum of weights
    zeros = scratch(ROW)
    zero = floats(zeros, (PANEL_COLUMNS,))
    for i in range(PANEL_COLUMNS):
        zero[i] = 0
    others = scratch(CONFIGURATION)
    save_configuration(others)
    configured = 0
    for begin in range(0, context, block_size):
        place = (table[begin // block_size] * num_kv_heads + head) * block_elements * 2
        _arrange(keys + place, head_dim, block_size, head_dim, key_tiles)
        _arrange(values + place, block_size, head_dim, context - begin, value_tiles)
        for first in range(0, group * QUERY_BLOCK, MOST_ROWS):
            q = first % QUERY_BLOCK
            count = min(MOST_ROWS, num_queries - q)
            if count <= 0 or start + lo + q + count <= begin:
                continue
            if count != configured:
                configure(count)
                configured = count
            left, width = lefts + first * head_dim * 2, head_dim * 2
            for panel in range(block_size // PANEL_COLUMNS):
                load_sums(count, zeros, 0)
                tiles = key_tiles + panel * head_dim * PANEL_COLUMNS * 2
                add_product(count, head_dim // TILE_DEPTH, left, width, tiles, False)
                store_sums(count, scores + panel * PANEL_COLUMNS * 4, block_size * 4)
            stats_at, totals = stats + first * 2 * 4, sums + first * head_dim * 4
            _weigh(count, start + lo + q + 1 - begin, block_size, head_dim, scores, weights, stats_at, totals)
            for panel in range(head_dim // PANEL_COLUMNS):
                total_at = totals + panel * PANEL_COLUMNS * 4
                load_sums(count, total_at, head_dim * 4)
                tiles = value_tiles + panel * block_size * PANEL_COLUMNS * 2
                add_product(count, block_size // TILE_DEPTH, weights, block_size * 2, tiles, False)
                store_sums(count, total_at, head_dim * 4)
    load_configuration(others)
    for j in range(group):
        for q in range(num_queries):
            place = j * QUERY_BLOCK + q
            total = floats(sums + place * head_dim * 4, (head_dim,))
            stat = floats(stats + place * 2 * 4, (2,))
            result = halves(output + ((lo + q) * num_heads + head * group + j) * head_dim * 2, (head_dim,))
            scale = np.float32(1) / stat[1]
            for i in range(head_dim):
                result[i] = bfloat_of_float(total[i] * scale)
