"""Kernel of the attention of prompt tokens to themselves and to all tokens before, by the CPU's matrix unit.

Engine process, CPU. See ``prefill_attention.py``, which does the same by vector registers, and ``tiles.py`` for what
tiles are.
"""

from __future__ import annotations

from engine.torch_core.kernels.language import (
    CACHE_LINE,
    Address,
    compiled,
    floats,
    ints,
    scratch,
)
from engine.torch_core.kernels.layout import QUERY_BLOCK, TILE_DEPTH, TILE_PANEL, TILE_ROWS, attend_tiles_bytes
from engine.torch_core.kernels.prefill_attention import finish_of, start_of, weigh_of
from engine.torch_core.kernels.tiles import (
    CONFIGURATION,
    MOST_ROWS,
    ROW,
    TILE,
    add_product,
    configure,
    interleave,
    load_configuration,
    load_sums,
    save_configuration,
    store_sums,
)

_workspace_bytes = compiled(attend_tiles_bytes)
_start, _weigh, _finish = start_of("bfloat16"), weigh_of("bfloat16"), finish_of("bfloat16")


@compiled
def _arrange(source: Address, num_rows: int, num_columns: int, num_valid: int, zeros: Address, target: Address) -> None:
    """target (num_columns / 32, num_rows / 32, 2) right tiles = source (num_rows, num_columns) float16, rounded.

    Rows from ``num_valid`` on count as zeros.
    """
    for row in range(0, num_rows, 2):
        depth, pair = row // TILE_DEPTH, row % TILE_DEPTH // 2
        for half in range(num_columns // TILE_ROWS):
            first = source + (row * num_columns + half * TILE_ROWS) * 2
            second = first + num_columns * 2
            first = first if row < num_valid else zeros
            second = second if row + 1 < num_valid else zeros
            tile = (half // 2 * (num_rows // TILE_DEPTH) + depth) * 2 + half % 2
            interleave(first, second, target + tile * TILE + pair * CACHE_LINE)


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
    query = queries + (lo * row_stride + head * group * head_dim) * 4
    _start(group, num_queries, head_dim, row_stride, query, lefts, sums, stats)
    zeros = scratch(ROW)
    zero = floats(zeros, (TILE_PANEL,))
    for i in range(TILE_PANEL):
        zero[i] = 0
    others = scratch(CONFIGURATION)
    save_configuration(others)
    configured = 0
    for begin in range(0, context, block_size):
        place = (table[begin // block_size] * num_kv_heads + head) * block_elements * 2
        _arrange(keys + place, head_dim, block_size, head_dim, zeros, key_tiles)
        _arrange(values + place, block_size, head_dim, context - begin, zeros, value_tiles)
        for first in range(0, group * QUERY_BLOCK, MOST_ROWS):
            q = first % QUERY_BLOCK
            count = min(MOST_ROWS, num_queries - q)
            if count <= 0 or start + lo + q + count <= begin:
                continue
            if count != configured:
                configure(count)
                configured = count
            left, width = lefts + first * head_dim * 2, head_dim * 2
            for panel in range(block_size // TILE_PANEL):
                load_sums(count, zeros, 0)
                tiles = key_tiles + panel * head_dim * TILE_PANEL * 2
                add_product(count, head_dim // TILE_DEPTH, left, width, tiles, False)
                store_sums(count, scores + panel * TILE_PANEL * 4, block_size * 4)
            stats_at, totals = stats + first * 2 * 4, sums + first * head_dim * 4
            _weigh(count, start + lo + q + 1 - begin, block_size, head_dim, scores, weights, stats_at, totals)
            for panel in range(head_dim // TILE_PANEL):
                total_at = totals + panel * TILE_PANEL * 4
                load_sums(count, total_at, head_dim * 4)
                tiles = value_tiles + panel * block_size * TILE_PANEL * 2
                add_product(count, block_size // TILE_DEPTH, weights, block_size * 2, tiles, False)
                store_sums(count, total_at, head_dim * 4)
    load_configuration(others)
    result = output + (lo * num_heads + head * group) * head_dim * 2
    _finish(group, num_queries, head_dim, num_heads, sums, stats, result)
