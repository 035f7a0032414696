"""Attention of prompt tokens to themselves and to all tokens before, block by block of the context.

Engine process, CPU. See ``paged_attention.py`` for the cache. A block of queries and the heads that share a KV head are
rows of products with a block's keys and values, with a softmax that is corrected as it goes (Dao et al. 2022,
FlashAttention), but seldom. A query's result follows from its own context alone: it is bitwise the same however a
prompt is cut into chunks. Only a value that is no finite number also reaches earlier queries of its task: a weight of 0
times it is NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.torch_core.kernels.language import (
    DTYPES,
    Address,
    Array,
    Float,
    compiled,
    floats,
    halves,
    ints,
    rounded_to_bfloat,
)
from engine.torch_core.kernels.layout import QUERY_BLOCK, QUERY_ROWS, attend_bytes
from engine.torch_core.kernels.products import add_product
from engine.torch_core.kernels.rows import exp, exp_between, greatest

_workspace_bytes = compiled(attend_bytes)
ROOM = np.float32(8)  # a score may be that much greater than what a row's weights are relative to


def start_of(dtype: str) -> Callable[..., None]:
    """For queries that are copied as float32 or as bfloat16."""
    cells, width, save = DTYPES[dtype]

    @compiled
    def start(
        group: int, num_queries: int, head_dim: int, row_stride: int, queries: Address, lefts: Address, sums: Address,
        stats: Address,
    ) -> None:  # fmt: skip
        """lefts (group, QUERY_BLOCK, head_dim) = queries (num_queries, group, head_dim) over the root of head_dim.

        ``row_stride``: from one query to the next. sums, of the shape of lefts, and stats, see ``weigh_of``, begin.
        """
        scale = np.float32(1 / np.sqrt(head_dim))
        for j in range(group):
            for q in range(num_queries):
                place = j * QUERY_BLOCK + q
                query = floats(queries + (q * row_stride + j * head_dim) * 4, (head_dim,))
                left = cells(lefts + place * head_dim * width, (head_dim,))
                total = floats(sums + place * head_dim * 4, (head_dim,))
                stat = floats(stats + place * 2 * 4, (2,))
                for i in range(head_dim):
                    left[i] = save(query[i] * scale)
                    total[i] = 0
                stat[0] = -np.inf
                stat[1] = 0

    function: Callable[..., None] = start
    return function


@compiled
def _share(score: Float) -> Float:
    """e to a score less its reference, 0 where that is hardly a number."""
    share = exp_between(score)
    return np.float32(0) if score < np.float32(-87) else share


def _shares_of(dtype: str) -> Callable[..., Float]:
    """For weights that replace the scores, float32, or stand beside them, bfloat16."""

    @compiled
    def replace(score: Array, top: Float, weights: Address) -> Float:
        """Scores become weights; returns their sum."""
        added = np.float32(0)
        for t in range(len(score)):
            share = _share(score[t] - top)
            score[t] = share
            added += share
        return added

    @compiled
    def write(score: Array, top: Float, weights: Address) -> Float:
        """weights (num_scores,); returns their sum, unrounded."""
        weight = halves(weights, (len(score),))
        added = np.float32(0)
        for t in range(len(score)):
            share = _share(score[t] - top)
            weight[t] = rounded_to_bfloat(share)
            added += share
        return added

    function: Callable[..., Float] = replace if dtype == "float32" else write
    return function


def weigh_of(dtype: str) -> Callable[..., None]:
    """For weights that replace the scores, float32, or stand beside them, bfloat16."""
    _, width, _ = DTYPES[dtype]
    share_out = _shares_of(dtype)

    @compiled
    def weigh(
        num_rows: int,
        num_seen: int,
        block_size: int,
        head_dim: int,
        scores: Address,
        weights: Address,
        stats: Address,
        totals: Address,
    ) -> None:
        """weights (num_rows, block_size) = e to the scores, of the same shape, less each row's reference.

        The first row sees ``num_seen`` of them, the next one more. stats (num_rows, 2): the reference and the sum of
        weights. The reference is the greatest score so far, but is not moved for one that is greater by less than ROOM:
        it seldom moves after the first block, and only then are totals (num_rows, head_dim) brought up to date.
        """
        for i in range(num_rows):
            stat = floats(stats + i * 2 * 4, (2,))
            score = floats(scores + i * block_size * 4, (block_size,))
            if num_seen + i < block_size:
                for t in range(max(0, num_seen + i), block_size):
                    score[t] = -np.inf
            top = stat[0]
            is_above = False
            for t in range(block_size):
                is_above |= score[t] > top + ROOM
            if is_above:
                top = greatest(score, top)
                shrink = exp(stat[0] - top)
                total = floats(totals + i * head_dim * 4, (head_dim,))
                for d in range(head_dim):
                    total[d] *= shrink
                stat[0] = top
                stat[1] *= shrink
            stat[1] += share_out(score, top, weights + i * block_size * width)

    function: Callable[..., None] = weigh
    return function


def finish_of(dtype: str) -> Callable[..., None]:
    """For results of float32 or bfloat16."""
    cells, width, save = DTYPES[dtype]

    @compiled
    def finish(
        group: int, num_queries: int, head_dim: int, num_heads: int, sums: Address, stats: Address, output: Address
    ) -> None:
        """output (num_queries, group, head_dim) = sums over their sums of weights; rows are num_heads heads apart."""
        for j in range(group):
            for q in range(num_queries):
                place = j * QUERY_BLOCK + q
                total = floats(sums + place * head_dim * 4, (head_dim,))
                stat = floats(stats + place * 2 * 4, (2,))
                result = cells(output + (q * num_heads + j) * head_dim * width, (head_dim,))
                scale = np.float32(1) / stat[1]
                for i in range(head_dim):
                    result[i] = save(total[i] * scale)

    function: Callable[..., None] = finish
    return function


def attend_prompt_kernel(dtype: str, output_dtype: str) -> Callable[..., None]:
    """For a cache of float32 or float16, and results of float32 or bfloat16."""
    _, width, _ = DTYPES[dtype]
    _, output_width, _ = DTYPES[output_dtype]
    start_queries, weigh, finish = start_of("float32"), weigh_of("float32"), finish_of(output_dtype)
    add = add_product(dtype)

    @compiled
    def attend_prompt(
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

        num_rows tokens, of which the first is number ``start`` of its sequence; blocks: of all its tokens, int64.
        queries (num_rows, num_heads, head_dim), row_stride apart; keys, values: the cache of a layer. workspaces:
        ``attend_bytes`` for each thread. output (num_rows, num_heads, head_dim).
        """
        group = num_heads // num_kv_heads
        head = task % num_kv_heads
        lo = ((num_rows + QUERY_BLOCK - 1) // QUERY_BLOCK - 1 - task // num_kv_heads) * QUERY_BLOCK
        num_queries = min(QUERY_BLOCK, num_rows - lo)
        context = start + lo + num_queries
        table = ints(blocks, ((context + block_size - 1) // block_size,))
        lefts = workspaces + slot * _workspace_bytes(group, head_dim, block_size)
        sums = lefts + group * QUERY_BLOCK * head_dim * 4
        stats = sums + group * QUERY_BLOCK * head_dim * 4
        scores = stats + group * QUERY_BLOCK * 2 * 4
        query = queries + (lo * row_stride + head * group * head_dim) * 4
        start_queries(group, num_queries, head_dim, row_stride, query, lefts, sums, stats)
        row, score_row = head_dim * 4, block_size * 4
        for begin in range(0, context, block_size):
            num_tokens = min(block_size, context - begin)
            place = (table[begin // block_size] * num_kv_heads + head) * block_size * head_dim * width
            key, value = keys + place, values + place
            for q in range(0, num_queries, QUERY_ROWS):
                count = min(QUERY_ROWS, num_queries - q)
                if start + lo + q + count <= begin:
                    continue
                num_seen = start + lo + q + 1 - begin
                for j in range(group):
                    place = j * QUERY_BLOCK + q
                    left, totals, score = lefts + place * row, sums + place * row, floats(scores, (count * block_size,))
                    for i in range(count * block_size):
                        score[i] = 0
                    add(count, head_dim, block_size, left, row, key, score_row // 4 * width, scores, score_row, 0)
                    stat = stats + place * 2 * 4
                    weigh(count, num_seen, block_size, head_dim, scores, scores, stat, totals)
                    add(count, num_tokens, head_dim, scores, score_row, value, row // 4 * width, totals, row, 0)
        result = output + (lo * num_heads + head * group) * head_dim * output_width
        finish(group, num_queries, head_dim, num_heads, sums, stats, result)

    kernel: Callable[..., None] = attend_prompt
    return kernel
