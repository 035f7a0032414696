"""Kernels for the paged KV cache: store a row's keys and values, attend to those of its context.

Engine process, CPU. See ``rows.py`` for what a kernel is. The cache holds float32 or float16. Keys are stored
transposed, (num_blocks, num_kv_heads, head_dim, block_size), values as (num_blocks, num_kv_heads, block_size,
head_dim): in both products the innermost loop runs over neighbours in memory.

A long context is attended to in segments of fixed size, so that threads share it, and their results merged (the split
of Flash-Decoding, Dao et al. 2023); within a segment, block by block with a softmax that is corrected as it goes
(Milakov and Gimelshein 2018). A row's segments follow from its own context alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.torch_core.kernels.language import DTYPES, Address, compiled, floats, ints
from engine.torch_core.kernels.products import add_product
from engine.torch_core.kernels.rows import exp, greatest


def store_kernel(dtype: str) -> Callable[..., None]:
    """For a cache of float32 or float16."""
    cells, width, save = DTYPES[dtype]

    @compiled
    def store(
        task: int,
        slot: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        row_stride: int,
        blocks: Address,
        offsets: Address,
        new_keys: Address,
        new_values: Address,
        keys: Address,
        values: Address,
    ) -> None:
        """A row of new keys and values, (num_kv_heads, head_dim) each and row_stride apart, to its block and offset.

        blocks, offsets (num_rows,) int64; keys, values: the cache of a layer.
        """
        block, offset = ints(blocks, (task + 1,))[task], ints(offsets, (task + 1,))[task]
        for head in range(num_kv_heads):
            place = (block * num_kv_heads + head) * head_dim * block_size * width
            source = (task * row_stride + head * head_dim) * 4
            new_key, new_value = floats(new_keys + source, (head_dim,)), floats(new_values + source, (head_dim,))
            key = cells(keys + place, (head_dim, block_size))
            value = cells(values + place, (block_size, head_dim))
            for i in range(head_dim):
                key[i, offset] = save(new_key[i])
                value[offset, i] = save(new_value[i])

    kernel: Callable[..., None] = store
    return kernel


def attend_kernel(dtype: str, output_dtype: str) -> Callable[..., None]:
    """For a cache of float32 or float16, and results of float32 or bfloat16."""
    _, width, _ = DTYPES[dtype]
    results, result_width, save = DTYPES[output_dtype]
    add = add_product(dtype)

    @compiled
    def attend(
        task: int,
        slot: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        segment_size: int,
        row_stride: int,
        segment_rows: Address,
        first_segments: Address,
        context_lens: Address,
        block_starts: Address,
        tables: Address,
        queries: Address,
        keys: Address,
        values: Address,
        workspaces: Address,
        partials: Address,
        output: Address,
    ) -> None:
        """A segment of a row's context and the query heads of one KV head; a task is (segment, KV head).

        segment_rows (num_segments,): the row of each; first_segments, context_lens, block_starts (num_rows,): a row's
        first segment, its tokens, and where its blocks begin in tables: all int64. queries (num_rows, num_heads,
        head_dim), row_stride apart. workspaces (num_threads, group, 2 head_dim + block_size + 2), of the query heads
        of a KV head. Results go to output (num_rows, num_heads, head_dim) where the row has one segment, else to
        partials (num_segments, num_heads, head_dim + 2): sums over the segment, the greatest score, sum of weights.
        """
        group = num_heads // num_kv_heads
        segment, head = task // num_kv_heads, task % num_kv_heads
        row = ints(segment_rows, (segment + 1,))[segment]
        context = ints(context_lens, (row + 1,))[row]
        lo = (segment - ints(first_segments, (row + 1,))[row]) * segment_size
        hi = min(context, lo + segment_size)
        first_block = ints(block_starts, (row + 1,))[row]
        table = ints(tables, (first_block + (context - 1) // block_size + 1,))
        query = floats(queries + (row * row_stride + head * group * head_dim) * 4, (group, head_dim))
        scaled_at = workspaces + slot * group * (2 * head_dim + block_size + 2) * 4
        sums_at = scaled_at + group * head_dim * 4
        weights_at = sums_at + group * head_dim * 4
        tops_at = weights_at + group * block_size * 4
        scaled, sums = floats(scaled_at, (group, head_dim)), floats(sums_at, (group, head_dim))
        weights, tops = floats(weights_at, (group, block_size)), floats(tops_at, (group, 2))
        scale = np.float32(1 / np.sqrt(head_dim))
        for j in range(group):
            for i in range(head_dim):
                scaled[j, i] = query[j, i] * scale
                sums[j, i] = 0
            tops[j, 0] = -np.inf  # the greatest score so far
            tops[j, 1] = 0  # the sum of weights
        size = head_dim * block_size * width
        place = (table[first_block + lo // block_size] * num_kv_heads + head) * size
        for start in range(lo, hi, block_size):
            count, next_place = min(block_size, hi - start), place
            if start + block_size < hi:
                next_place = (table[first_block + start // block_size + 1] * num_kv_heads + head) * size
            for j in range(group):
                for t in range(block_size):
                    weights[j, t] = 0
            add(
                group, head_dim, block_size, scaled_at, head_dim * 4,
                keys + place, block_size * width, weights_at, block_size * 4, values - keys,
            )  # fmt: skip
            for j in range(group):
                top = greatest(weights[j, :count], tops[j, 0])
                shrink = exp(tops[j, 0] - top)
                total = np.float32(0)
                for t in range(count):
                    weight = exp(weights[j, t] - top)
                    weights[j, t] = weight
                    total += weight
                for i in range(head_dim):
                    sums[j, i] *= shrink
                tops[j, 0] = top
                tops[j, 1] = tops[j, 1] * shrink + total
            add(
                group, count, head_dim, weights_at, block_size * 4,
                values + place, head_dim * width, sums_at, head_dim * 4, keys + next_place - values - place,
            )  # fmt: skip
            place = next_place
        if context <= segment_size:
            result = results(output + (row * num_heads + head * group) * head_dim * result_width, (group, head_dim))
            for j in range(group):
                for i in range(head_dim):
                    result[j, i] = save(sums[j, i] / tops[j, 1])
        else:
            place = (segment * num_heads + head * group) * (head_dim + 2) * 4
            partial = floats(partials + place, (group, head_dim + 2))
            for j in range(group):
                for i in range(head_dim):
                    partial[j, i] = sums[j, i]
                partial[j, head_dim] = tops[j, 0]
                partial[j, head_dim + 1] = tops[j, 1]

    kernel: Callable[..., None] = attend
    return kernel


def merge_kernel(output_dtype: str) -> Callable[..., None]:
    """For results of float32 or bfloat16."""
    results, width, save = DTYPES[output_dtype]

    @compiled
    def merge(
        task: int,
        slot: int,
        num_heads: int,
        head_dim: int,
        segment_size: int,
        first_segments: Address,
        context_lens: Address,
        partials: Address,
        output: Address,
    ) -> None:
        """Merge the segments of a row and a head, in their order; a task is (row, head). See ``attend``."""
        row, head = task // num_heads, task % num_heads
        context = ints(context_lens, (row + 1,))[row]
        if context <= segment_size:
            return
        first = ints(first_segments, (row + 1,))[row]
        last = first + (context - 1) // segment_size
        parts = floats(partials, (last + 1, num_heads, head_dim + 2))
        result = results(output + task * head_dim * width, (head_dim,))
        top = parts[first, head, head_dim]
        for segment in range(first + 1, last + 1):
            top = max(top, parts[segment, head, head_dim])
        total = np.float32(0)
        for segment in range(first, last + 1):
            share = exp(parts[segment, head, head_dim] - top)
            parts[segment, head, head_dim] = share
            total += share * parts[segment, head, head_dim + 1]
        for i in range(head_dim):
            sum_ = np.float32(0)
            for segment in range(first, last + 1):
                sum_ += parts[segment, head, head_dim] * parts[segment, head, i]
            result[i] = save(sum_ / total)

    kernel: Callable[..., None] = merge
    return kernel
