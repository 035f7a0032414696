"""Attention over the paged KV cache on a GPU: flash-attn where it is installed and fits, else gathered blocks.

Engine process; the gathering one runs on any device (on a CPU, ``attention.py`` is several times faster). All shapes
of a decode step follow from (rows, width) alone, and no value is read back, so that a CUDA graph can record it.

* flash-attn reads the blocks where they are, decodes and prefills of a step in one call. It wants half precision
  and blocks of a multiple of 256 tokens.
* Gathering copies the blocks of a context for scaled_dot_product_attention: three times the traffic, but everywhere.
"""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.torch_core.batch import PrefillRun, StepBatch
from engine.torch_core.model_spec import ModelSpec
from engine.torch_core.transfer import upload

FLASH_BLOCK_SIZE = 256  # flash-attn takes multiples of it
GATHERED_TOKENS = 1 << 17  # contexts of decodes are gathered in portions of so many tokens, or of one row

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows lo .. hi-1, each with a context of its own, padded to a common number of blocks."""

    lo: int
    hi: int
    tables: Tensor  # (rows, width) int64 blocks; padding is the spare block
    context_lens: Tensor  # (rows,) int64


class PagedAttention(ABC):
    """The KV cache of all layers and attention over it. One block more than asked for takes the writes of padding."""

    fixed_width = 0  # what ``graph_width`` always is; 0: it depends on the batch

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.spec = spec
        self.block_size = block_size
        self.device = device
        self.spare_block = num_blocks
        shape = (spec.num_layers, 2, num_blocks + 1, block_size, spec.num_kv_heads, spec.head_dim)
        self._cache = torch.zeros(shape, device=device, dtype=dtype)
        self._slots: Tensor  # (rows,) int64 places of the step's keys and values: block * block_size + offset

    @staticmethod
    def bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
        """Size of one token's keys and values in all layers."""
        return 2 * dtype.itemsize * spec.num_layers * spec.num_kv_heads * spec.head_dim

    def empty_new_blocks(self, batch: StepBatch) -> None:
        """Queue zeros into the blocks whose first place a step writes; to be done before anything else of it.

        A mask gives the rest of a block no weight, but numbers that overflowed in an earlier request, times 0, are NaN.
        """
        blocks = batch.write_blocks[batch.write_offsets == 0]
        if len(blocks):
            self._cache.index_fill_(2, upload(blocks, self.device), 0.0)

    def begin(self, batch: StepBatch) -> None:
        """Upload what a step's layers share."""
        self._slots = upload(slots_of(batch, self.block_size), self.device)
        self._plan(batch)

    def begin_static(self, slots: Tensor, rows: DecodeRows) -> None:
        """Use tensors that stay where they are, for a graph of decodes alone."""
        self._slots = slots
        self._plan_static(rows)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See ``model.Attention``."""
        for kind, rows in enumerate((key, value)):
            self._cache[layer, kind].flatten(0, 1).index_copy_(0, self._slots, rows)
        return self._attend(layer, query, key, value)

    @abstractmethod
    def graph_width(self, batch: StepBatch) -> int:
        """Blocks of context that a graph for these decodes must have room for; 0: better without a graph."""

    @abstractmethod
    def _plan(self, batch: StepBatch) -> None: ...

    @abstractmethod
    def _plan_static(self, rows: DecodeRows) -> None: ...

    @abstractmethod
    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Prefill:
    run: PrefillRun
    blocks: Tensor
    mask: Tensor | None  # (num_rows, blocks * block_size) bool; None: causal from the first token on


class GatherAttention(PagedAttention):
    """Copies the blocks of a context side by side."""

    _decodes: list[DecodeRows]
    _prefills: list[_Prefill]

    def graph_width(self, batch: StepBatch) -> int:
        """See PagedAttention: rows of short contexts would be padded to the longest, so only where that is little."""
        width = max(group.width for group in batch.groups)
        needed = sum((group.hi - group.lo) * group.width for group in batch.groups)
        return width if len(batch.token_ids) * width <= 2 * needed else 0

    def _plan(self, batch: StepBatch) -> None:
        self._decodes = []
        for group in batch.groups:
            tables, lens = padded_tables(batch, group.lo, group.hi, group.width, self.spare_block, self.block_size)
            rows = DecodeRows(group.lo, group.hi, upload(tables, self.device), upload(lens, self.device))
            self._decodes.append(rows)
        self._prefills = [self._plan_prefill(run) for run in batch.prefills]

    def _plan_static(self, rows: DecodeRows) -> None:
        self._decodes, self._prefills = [rows], []

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outputs = []
        for rows in self._decodes:
            portion = max(1, GATHERED_TOKENS // (rows.tables.shape[1] * self.block_size))
            for lo in range(rows.lo, rows.hi, portion):
                hi = min(lo + portion, rows.hi)
                mine = slice(lo - rows.lo, hi - rows.lo)
                outputs.append(self._decode(layer, query[lo:hi], rows.tables[mine], rows.context_lens[mine]))
        for one in self._prefills:
            mine = slice(one.run.lo, one.run.hi)
            outputs.append(self._prefill(layer, query[mine], key[mine], value[mine], one))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _decode(self, layer: int, query: Tensor, tables: Tensor, context_lens: Tensor) -> Tensor:
        # (rows, width, block_size, kv_heads, head_dim) -> (rows, kv_heads, context, head_dim)
        keys, values = (self._cache[layer, kind][tables].flatten(1, 2).transpose(1, 2) for kind in range(2))
        mask = torch.arange(keys.shape[2], device=self.device) < context_lens[:, None]
        grouped = query.reshape(len(query), self.spec.num_kv_heads, -1, self.spec.head_dim)
        output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask[:, None, None])
        return output.reshape(len(query), -1)

    def _prefill(self, layer: int, query: Tensor, key: Tensor, value: Tensor, prefill: _Prefill) -> Tensor:
        spec = self.spec
        group = spec.num_heads // spec.num_kv_heads
        if prefill.mask is None:
            keys, values = key.transpose(0, 1), value.transpose(0, 1)
        else:  # (kv_heads, blocks * block_size, head_dim)
            keys, values = (self._cache[layer, kind][prefill.blocks].flatten(0, 1).transpose(0, 1) for kind in range(2))
        output = F.scaled_dot_product_attention(
            query.view(len(query), spec.num_kv_heads, group, -1).permute(1, 2, 0, 3),
            keys.unsqueeze(1).expand(-1, group, -1, -1),
            values.unsqueeze(1).expand(-1, group, -1, -1),
            attn_mask=prefill.mask,
            is_causal=prefill.mask is None,
        )
        return output.permute(2, 0, 1, 3).reshape(len(query), -1)

    def _plan_prefill(self, run: PrefillRun) -> _Prefill:
        mask = None
        if run.start > 0:
            shape = (run.hi - run.lo, len(run.blocks) * self.block_size)
            mask = torch.ones(shape, dtype=torch.bool, device=self.device).tril(run.start)
        return _Prefill(run, upload(run.blocks, self.device), mask)


class FlashAttention(PagedAttention):
    """``flash_attn_varlen_func`` (Dao 2023) over the block tables: each decode, and each prefill, is a sequence."""

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        kernel: Callable[..., Tensor],
        max_len: int,
    ) -> None:
        super().__init__(spec, num_blocks, block_size, device, dtype)
        self._kernel = kernel
        self.fixed_width = -(-max_len // block_size)
        self._arguments: tuple[Tensor, Tensor, int, int]  # query starts, context starts, longest query and context
        self._tables: Tensor  # (sequences, width) int32

    @staticmethod
    def fits(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> bool:
        """Whether flash-attn has a kernel for this."""
        is_half = dtype in (torch.float16, torch.bfloat16)
        return is_half and block_size % FLASH_BLOCK_SIZE == 0 and spec.head_dim % 8 == 0 and spec.head_dim <= 256

    def graph_width(self, batch: StepBatch) -> int:
        """See PagedAttention: a longer table costs nothing, so one width does for all."""
        return self.fixed_width

    def _plan(self, batch: StepBatch) -> None:
        num_decodes = batch.prefills[0].lo if batch.prefills else len(batch.token_ids)
        width = max([group.width for group in batch.groups] + [len(run.blocks) for run in batch.prefills])
        tables = np.full((num_decodes + len(batch.prefills), width), self.spare_block, np.int32)
        counts = np.ones(len(tables), np.int32)
        lens = np.ones(len(tables), np.int32)
        if num_decodes:
            tables[:num_decodes], lens[:num_decodes] = padded_tables(
                batch, 0, num_decodes, width, self.spare_block, self.block_size
            )
        for index, run in enumerate(batch.prefills, num_decodes):
            tables[index, : len(run.blocks)] = run.blocks
            counts[index] = run.hi - run.lo
            lens[index] = run.start + run.hi - run.lo
        starts = np.zeros((2, len(tables) + 1), np.int32)
        np.cumsum([counts, lens], axis=1, out=starts[:, 1:])
        query_starts, context_starts = upload(starts, self.device)
        self._tables = upload(tables, self.device)
        self._arguments = (query_starts, context_starts, int(counts.max()), int(lens.max()))

    def _plan_static(self, rows: DecodeRows) -> None:
        self._tables = rows.tables.to(torch.int32)
        query_starts = torch.arange(len(rows.tables) + 1, dtype=torch.int32, device=self.device)
        context_starts = F.pad(rows.context_lens.cumsum(0, dtype=torch.int32), (1, 0))
        self._arguments = (query_starts, context_starts, 1, rows.tables.shape[1] * self.block_size)

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._cache[layer].unbind(0)
        output = self._kernel(query, keys, values, *self._arguments, causal=True, block_table=self._tables)
        return output.flatten(1)


def paged_attention(
    spec: ModelSpec, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype, max_len: int
) -> PagedAttention:
    """The best one that runs here."""
    if FlashAttention.fits(spec, block_size, dtype) and torch.cuda.get_device_capability(device) >= (8, 0):
        try:
            kernel = importlib.import_module("flash_attn").flash_attn_varlen_func
        except (ImportError, AttributeError) as error:  # not installed, or built for another torch
            log.info("attention gathers blocks: flash-attn is not usable error=%s", error)
        else:
            return FlashAttention(spec, num_blocks, block_size, device, dtype, kernel=kernel, max_len=max_len)
    return GatherAttention(spec, num_blocks, block_size, device, dtype)


def slots_of(batch: StepBatch, block_size: int) -> npt.NDArray[np.int64]:
    """Where each row's key and value go, (num_rows,), in the cache as one row of tokens."""
    return batch.write_blocks * block_size + batch.write_offsets


def padded_tables(
    batch: StepBatch, lo: int, hi: int, width: int, spare_block: int, block_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Block tables (hi - lo, width) of decode rows, and the context length of each."""
    lens, starts = batch.context_lens[lo:hi], batch.block_starts[lo:hi]
    ranks = np.arange(width)
    used = ranks < -(-lens // block_size)[:, None]
    places = np.where(used, starts[:, None] + ranks, 0)
    return np.where(used, batch.blocks[places], spare_block), lens
