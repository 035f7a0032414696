"""Attention over the paged KV cache on a CPU.

Engine process. One query over a paged cache is two weighted sums of table rows, which is what
``torch.embedding_bag`` computes, over any list of rows, without copying or padding:

* scores: keys are stored transposed, a row for each (block, head, dimension) with the block's tokens as columns; the
  scores of a block are the sum of its head_dim rows, weighted by the query.
* output: values are stored as a row for each (block, head, token); the output is their sum, weighted by the softmax.

Measured against gathering the blocks and scaled_dot_product_attention (32 sequences of 384 tokens, 9 heads of 64,
2 threads): 0.6 ms against 3.5 ms for a layer. Each sum runs in the order of its rows, whatever else is in the batch, so
lookups are batch-invariant where no group is padded: the softmax then has a width that depends on the row's own context
alone. Long prefill chunks have enough queries for each key to be worth a copy: but for the deterministic mode their
context is gathered, see ``prefill_attention.py``.

Number formats follow that of the weights. With float32 weights everything is float32. Else the cache holds float16,
which a lookup reads a third faster; sums are float32. It costs a KL divergence of 3e-6 (bfloat16, with as many bytes,
1.6e-4). A model whose scaled scores exceed 65504 needs float32 weights.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.torch_core.batch import LookupGroup, PrefillRun, StepBatch, merge_groups
from engine.torch_core.model_spec import ModelSpec
from engine.torch_core.prefill_attention import ATTEND, causal_mask

MAX_LOOKUP_TOKENS = 4  # longer chunks are prefilled
DETERMINISTIC_MAX_TOKENS = 128  # of one step, since lookups list every (row, head, token)
MAX_PADDING = 256  # blocks; to pad a row by one costs 0.1 us of a layer, a second group of rows 30


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
    mask: Tensor  # (rows, 1, width * block_size), as the cache: 0 where a row attends, else -inf


@dataclass(frozen=True, slots=True)
class _Prefill:
    run: PrefillRun
    blocks: Tensor
    mask: Tensor | None  # see ``causal_mask``


class CpuAttention:
    """The KV cache of all layers and attention over it."""

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        weight_format: str = "float32",
        max_padding: int = MAX_PADDING,
    ) -> None:
        """``max_padding``: by how many blocks the rows of a group may be padded in all; 0 for batch invariance."""
        self.spec = spec
        self.block_size = block_size
        self._dtype = _cache_dtype(weight_format)
        self._prefill_dtype = torch.bfloat16 if weight_format == "bfloat16" else torch.float32
        self._max_padding = max_padding
        self.scale = spec.head_dim**-0.5
        heads, dim = spec.num_kv_heads, spec.head_dim
        if num_blocks * heads * max(dim, block_size) >= 2**31:
            raise ValueError("the KV cache has more rows than an int32 can number: lower engine.kv_cache_bytes")
        # Zeros, since a masked token's weight of 0 must meet a finite value; mapped, so that unused ones cost nothing.
        numel = num_blocks * heads * dim * block_size
        tables = [_mapped_zeros(numel, self._dtype) for _ in range(2 * spec.num_layers)]
        self._keys = [table.view(num_blocks, heads, dim, block_size) for table in tables[::2]]
        self._values = [table.view(num_blocks, heads, block_size, dim) for table in tables[1::2]]
        self._write_to: tuple[Tensor, Tensor]
        self._lookups: list[_Lookup] = []
        self._prefills: list[_Prefill] = []

    @staticmethod
    def bytes_per_token(spec: ModelSpec, weight_format: str) -> int:
        """Size of one token's keys and values in all layers."""
        return 2 * _cache_dtype(weight_format).itemsize * spec.num_layers * spec.num_kv_heads * spec.head_dim

    def begin(self, batch: StepBatch) -> None:
        """Build a step's index tensors, which all layers share."""
        self._write_to = (torch.from_numpy(batch.write_blocks), torch.from_numpy(batch.write_offsets))
        groups = merge_groups(batch.groups, self._max_padding)
        self._lookups = [self._plan_lookup(batch, group) for group in groups]
        self._prefills = [self._plan_prefill(run) for run in batch.prefills]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store the rows' keys and values, then attend.

        query (num_rows, num_heads, head_dim), key and value (num_rows, num_kv_heads, head_dim), float32, rotated;
        returns (num_rows, num_heads * head_dim) float32.
        """
        self._keys[layer].permute(0, 3, 1, 2).index_put_(self._write_to, key.to(self._dtype))
        self._values[layer].permute(0, 2, 1, 3).index_put_(self._write_to, value.to(self._dtype))
        outputs = [self._look_up(layer, query[lookup.lo : lookup.hi], lookup) for lookup in self._lookups]
        outputs += [self._prefill(layer, query, key, value, prefill) for prefill in self._prefills]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _look_up(self, layer: int, query: Tensor, lookup: _Lookup) -> Tensor:
        spec, size = self.spec, self.block_size
        num_rows = len(query)
        queries = (query * self.scale).to(self._dtype).view(-1, spec.head_dim)
        weights = queries.index_select(0, lookup.query_of_bag).view(-1)
        keys = self._keys[layer].view(-1, size)
        scores = torch.embedding_bag(keys, lookup.key_ids, lookup.key_offsets, False, 0, False, weights)[0]
        scores = scores.view(num_rows, spec.num_heads, -1).add_(lookup.mask)
        probs = scores.softmax(dim=-1).view(-1, size)
        if lookup.padded_place is not None:
            probs = probs.index_select(0, lookup.padded_place)
        values = self._values[layer].view(-1, spec.head_dim)
        output = torch.embedding_bag(values, lookup.value_ids, lookup.value_offsets, False, 0, False, probs.view(-1))[0]
        return output.view(num_rows, -1).float()

    def _prefill(self, layer: int, query: Tensor, key: Tensor, value: Tensor, prefill: _Prefill) -> Tensor:
        run = prefill.run
        rows = slice(run.lo, run.hi)
        if run.start == 0:
            keys, values = key[rows].permute(1, 2, 0), value[rows].transpose(0, 1)
        else:
            context = run.start + run.hi - run.lo
            keys = self._keys[layer][prefill.blocks].permute(1, 2, 0, 3).flatten(2)[..., :context]
            values = self._values[layer][prefill.blocks].transpose(0, 1).flatten(1, 2)[:, :context]
        dtype = self._prefill_dtype
        return ATTEND[dtype](query[rows] * self.scale, keys.to(dtype), values.to(dtype), prefill.mask)

    def _plan_prefill(self, run: PrefillRun) -> _Prefill:
        return _Prefill(run, torch.from_numpy(run.blocks), causal_mask(run.hi - run.lo, run.start, self._prefill_dtype))

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
            mask=torch.from_numpy(np.where(attends, np.float32(0), np.float32(-np.inf))[:, None]).to(self._dtype),
        )


def _cache_dtype(weight_format: str) -> torch.dtype:
    return torch.float32 if weight_format == "float32" else torch.float16


def _mapped_zeros(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros that cost memory once they are written; on pages of 2 MiB, which take a quarter off a lookup's time."""
    memory = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
