"""Attention over the paged KV cache on a CPU.

Engine process. One query over a paged cache is two weighted sums of table rows, which is what
``torch.embedding_bag`` computes, over any list of rows, without copying or padding:

* scores: keys are stored transposed, a row for each (block, head, dimension) with the block's tokens as columns; the
  scores of a block are the sum of its head_dim rows, weighted by the query.
* output: values are stored as a row for each (block, head, token); the output is their sum, weighted by the softmax.

Measured against gathering the blocks and scaled_dot_product_attention (32 sequences of 384 tokens, 9 heads of 64,
2 threads): 0.6 ms against 3.5 ms for a layer. Each sum runs in the order of its rows, whatever else is in the batch, so
lookups are batch-invariant; the softmax is padded to a width that depends on the row's own context alone.
Long prefill chunks have enough queries for each key to be worth a copy: but for the deterministic mode their context
is gathered, for scaled_dot_product_attention. (Products of tiles in bfloat16 were tried: from 1,000 tokens of context
on slower, 23 ms against 16 at 3,800 for 256 rows of a layer.)
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.torch_core.batch import LookupGroup, PrefillRun, StepBatch
from engine.torch_core.model_spec import ModelSpec

MAX_LOOKUP_TOKENS = 4  # longer chunks are prefilled by scaled_dot_product_attention
DETERMINISTIC_MAX_TOKENS = 128  # of one step, since lookups list every (row, head, token)


@dataclass(frozen=True, slots=True)
class _Lookup:
    """The index tensors of a group; a *bag* is one (row, head, block)."""

    lo: int
    hi: int
    query_of_bag: Tensor  # (num_bags,) row * num_heads + head
    key_ids: Tensor  # (num_bags * head_dim,) int32
    key_offsets: Tensor  # (rows * num_heads * width,) int32; bags beyond a row's context are empty
    value_ids: Tensor  # (num_bags * block_size,) int32
    value_offsets: Tensor  # (rows * num_heads,) int32
    padded_place: Tensor | None  # (num_bags,) where each bag is among the padded ones; None if none are empty
    mask: Tensor  # (rows, 1, width * block_size) float32: 0 where a row attends, else -inf


@dataclass(frozen=True, slots=True)
class _Prefill:
    run: PrefillRun
    blocks: Tensor
    mask: Tensor | None  # (num_rows, context) bool; None: causal from the first token on


class CpuAttention:
    """The KV cache of all layers (float32) and attention over it."""

    def __init__(self, spec: ModelSpec, num_blocks: int, block_size: int) -> None:
        self.spec = spec
        self.block_size = block_size
        self.scale = spec.head_dim**-0.5
        heads, dim = spec.num_kv_heads, spec.head_dim
        if num_blocks * heads * max(dim, block_size) >= 2**31:
            raise ValueError("the KV cache has more rows than an int32 can number: lower engine.kv_cache_bytes")
        # Zeros, since a masked token's weight of 0 must meet a finite value; mapped, so that unused ones cost nothing.
        numel = num_blocks * heads * dim * block_size
        self._keys = [_mapped_zeros(numel).view(num_blocks, heads, dim, block_size) for _ in range(spec.num_layers)]
        self._write_to: tuple[Tensor, Tensor]
        self._lookups: list[_Lookup] = []
        self._prefills: list[_Prefill] = []
        self._values = [_mapped_zeros(numel).view(num_blocks, heads, block_size, dim) for _ in range(spec.num_layers)]

    @staticmethod
    def bytes_per_token(spec: ModelSpec) -> int:
        """Size of one token's keys and values in all layers."""
        return 2 * 4 * spec.num_layers * spec.num_kv_heads * spec.head_dim

    def begin(self, batch: StepBatch) -> None:
        """Build a step's index tensors, which all layers share."""
        self._write_to = (torch.from_numpy(batch.write_blocks), torch.from_numpy(batch.write_offsets))
        self._lookups = [self._plan_lookup(batch, group) for group in batch.groups]
        self._prefills = [_plan_prefill(run) for run in batch.prefills]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store the rows' keys and values, then attend.

        query (num_rows, num_heads, head_dim), key and value (num_rows, num_kv_heads, head_dim), float32, rotated;
        returns (num_rows, num_heads * head_dim).
        """
        self._keys[layer].permute(0, 3, 1, 2).index_put_(self._write_to, key)
        self._values[layer].permute(0, 2, 1, 3).index_put_(self._write_to, value)
        outputs = [self._look_up(layer, query[lookup.lo : lookup.hi], lookup) for lookup in self._lookups]
        outputs += [self._prefill(layer, query, key, value, prefill) for prefill in self._prefills]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _look_up(self, layer: int, query: Tensor, lookup: _Lookup) -> Tensor:
        spec, size = self.spec, self.block_size
        num_rows = len(query)
        weights = query.reshape(-1, spec.head_dim).index_select(0, lookup.query_of_bag)
        keys = self._keys[layer].view(-1, size)
        scores = torch.embedding_bag(keys, lookup.key_ids, lookup.key_offsets, False, 0, False, weights.view(-1))[0]
        scores = torch.add(lookup.mask, scores.view(num_rows, spec.num_heads, -1), alpha=self.scale)
        probs = scores.softmax(dim=-1).view(-1, size)
        if lookup.padded_place is not None:
            probs = probs.index_select(0, lookup.padded_place)
        values = self._values[layer].view(-1, spec.head_dim)
        output = torch.embedding_bag(values, lookup.value_ids, lookup.value_offsets, False, 0, False, probs.view(-1))[0]
        return output.view(num_rows, -1)

    def _prefill(self, layer: int, query: Tensor, key: Tensor, value: Tensor, prefill: _Prefill) -> Tensor:
        spec, run = self.spec, prefill.run
        group = spec.num_heads // spec.num_kv_heads
        rows = slice(run.lo, run.hi)
        num_rows = run.hi - run.lo
        if run.start == 0:
            keys, values = key[rows].transpose(0, 1), value[rows].transpose(0, 1)
        else:  # (num_kv_heads, context, head_dim)
            context = run.start + num_rows
            keys = self._keys[layer][prefill.blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, :context]
            values = self._values[layer][prefill.blocks].permute(1, 0, 2, 3).flatten(1, 2)[:, :context]
        queries = query[rows].view(num_rows, spec.num_kv_heads, group, -1).permute(1, 2, 0, 3)
        output = F.scaled_dot_product_attention(
            queries,
            keys.unsqueeze(1).expand(-1, group, -1, -1),
            values.unsqueeze(1).expand(-1, group, -1, -1),
            attn_mask=prefill.mask,
            is_causal=prefill.mask is None,
        )  # (num_kv_heads, group, num_rows, head_dim)
        return output.permute(2, 0, 1, 3).reshape(num_rows, -1)

    def _plan_lookup(self, batch: StepBatch, group: LookupGroup) -> _Lookup:
        spec, size = self.spec, self.block_size
        num_rows = group.hi - group.lo
        num_blocks = (group.context_lens - 1) // size + 1
        # Queries (row, head) have num_blocks[row] bags each; bags are in the order of queries.
        bags_of_query = np.repeat(num_blocks, spec.num_heads)
        query_of_bag = np.repeat(np.arange(num_rows * spec.num_heads), bags_of_query)
        first_bags = np.cumsum(bags_of_query) - bags_of_query
        rank = np.arange(len(query_of_bag)) - first_bags[query_of_bag]  # of the block within the row's context
        row_of_bag, head_of_bag = np.divmod(query_of_bag, spec.num_heads)
        kv_head_of_bag = head_of_bag // (spec.num_heads // spec.num_kv_heads)
        block_of_bag = batch.blocks[group.block_starts[row_of_bag] + rank]
        table_row = torch.from_numpy((block_of_bag * spec.num_kv_heads + kv_head_of_bag).astype(np.int32))[:, None]
        sizes = np.zeros((num_rows * spec.num_heads, group.width), np.int64)
        sizes[np.arange(group.width) < bags_of_query[:, None]] = spec.head_dim
        key_offsets = np.cumsum(sizes.ravel()) - sizes.ravel()
        attends = np.arange(group.width * size) < group.context_lens[:, None]
        is_ragged = len(query_of_bag) < num_rows * spec.num_heads * group.width
        return _Lookup(
            lo=group.lo,
            hi=group.hi,
            query_of_bag=torch.from_numpy(query_of_bag),
            key_ids=(table_row * spec.head_dim + torch.arange(spec.head_dim, dtype=torch.int32)).view(-1),
            key_offsets=torch.from_numpy(key_offsets.astype(np.int32)),
            value_ids=(table_row * size + torch.arange(size, dtype=torch.int32)).view(-1),
            value_offsets=torch.from_numpy((first_bags * size).astype(np.int32)),
            padded_place=torch.from_numpy(query_of_bag * group.width + rank) if is_ragged else None,
            mask=torch.from_numpy(np.where(attends, np.float32(0), np.float32(-np.inf))[:, None]),
        )


def _plan_prefill(run: PrefillRun) -> _Prefill:
    if run.start == 0:
        return _Prefill(run, torch.from_numpy(run.blocks), None)
    num_rows = run.hi - run.lo
    mask = torch.ones(num_rows, run.start + num_rows, dtype=torch.bool).tril(run.start)
    return _Prefill(run, torch.from_numpy(run.blocks), mask)


def _mapped_zeros(numel: int) -> Tensor:
    """Zeros that cost memory once they are written; on pages of 2 MiB, which take a quarter off a lookup's time."""
    memory = mmap.mmap(-1, numel * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32)
