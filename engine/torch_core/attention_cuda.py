"""Attention over the paged KV cache with gathered blocks and scaled_dot_product_attention: the GPU's way.

Engine process; runs on any device (on a CPU, ``attention.py`` is several times faster). All shapes of a decode step
follow from (rows, width) alone, and no value is read back, so that a CUDA graph can record it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.torch_core.batch import PrefillRun, StepBatch
from engine.torch_core.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows lo .. hi-1, padded to a common number of blocks."""

    lo: int
    hi: int
    tables: Tensor  # (rows, width) int64 blocks; padding is the spare block
    context_lens: Tensor  # (rows,) int64


@dataclass(frozen=True, slots=True)
class _Prefill:
    run: PrefillRun
    blocks: Tensor
    mask: Tensor  # (num_rows, context) bool


class GatherAttention:
    """The KV cache of all layers and attention over it. One block more than asked for takes the writes of padding."""

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.spec = spec
        self.block_size = block_size
        self.device = device
        self.spare_block = num_blocks
        shape = (spec.num_layers, 2, num_blocks + 1, spec.num_kv_heads, block_size, spec.head_dim)
        self._cache = torch.zeros(shape, device=device, dtype=dtype)
        self._write_to: tuple[Tensor, Tensor]
        self._decodes: list[DecodeRows] = []
        self._prefills: list[_Prefill] = []

    @staticmethod
    def bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
        """Size of one token's keys and values in all layers."""
        return 2 * dtype.itemsize * spec.num_layers * spec.num_kv_heads * spec.head_dim

    def begin(self, batch: StepBatch) -> None:
        """Upload a step's block tables."""
        self._write_to = (self.upload(batch.write_blocks), self.upload(batch.write_offsets))
        self._decodes = []
        for group in batch.groups:
            tables, lens = padded_tables(batch, group.lo, group.hi, group.width, self.spare_block, self.block_size)
            self._decodes.append(DecodeRows(group.lo, group.hi, self.upload(tables), self.upload(lens)))
        self._prefills = [self._plan_prefill(run) for run in batch.prefills]

    def begin_static(self, write_to: tuple[Tensor, Tensor], rows: DecodeRows) -> None:
        """Use tensors that stay where they are, for a graph."""
        self._write_to, self._decodes, self._prefills = write_to, [rows], []

    def upload(self, array: npt.NDArray[np.int64]) -> Tensor:
        """A copy on the device, made without waiting for it."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See ``model.Attention``."""
        for kind, rows in enumerate((key, value)):
            self._cache[layer, kind].permute(0, 2, 1, 3).index_put_(self._write_to, rows)
        outputs = [self._decode(layer, query[rows.lo : rows.hi], rows) for rows in self._decodes]
        outputs += [self._prefill(layer, query[one.run.lo : one.run.hi], one) for one in self._prefills]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _decode(self, layer: int, query: Tensor, rows: DecodeRows) -> Tensor:
        # (rows, width, kv_heads, block_size, head_dim) -> (rows, kv_heads, context, head_dim)
        keys, values = (self._cache[layer, kind][rows.tables].transpose(1, 2).flatten(2, 3) for kind in range(2))
        mask = torch.arange(keys.shape[2], device=self.device) < rows.context_lens[:, None]
        grouped = query.view(len(query), self.spec.num_kv_heads, -1, self.spec.head_dim)
        output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask[:, None, None])
        return output.reshape(len(query), -1)

    def _prefill(self, layer: int, query: Tensor, prefill: _Prefill) -> Tensor:
        spec, context = self.spec, prefill.mask.shape[1]
        group = spec.num_heads // spec.num_kv_heads
        keys, values = (
            self._cache[layer, kind][prefill.blocks].transpose(0, 1).flatten(1, 2)[:, None, :context]
            for kind in range(2)
        )
        queries = query.view(len(query), spec.num_kv_heads, group, -1).permute(1, 2, 0, 3)
        keys, values = keys.expand(-1, group, -1, -1), values.expand(-1, group, -1, -1)
        output = F.scaled_dot_product_attention(queries, keys, values, attn_mask=prefill.mask)
        return output.permute(2, 0, 1, 3).reshape(len(query), -1)

    def _plan_prefill(self, run: PrefillRun) -> _Prefill:
        num_rows = run.hi - run.lo
        mask = torch.ones(num_rows, run.start + num_rows, dtype=torch.bool, device=self.device).tril(run.start)
        return _Prefill(run, self.upload(run.blocks), mask)


def padded_tables(
    batch: StepBatch, lo: int, hi: int, width: int, spare_block: int, block_size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Block tables (hi - lo, width) of decode rows, and the context length of each."""
    lens = batch.positions[lo:hi] + 1
    starts = np.concatenate([group.block_starts for group in batch.groups])[lo:hi]
    ranks = np.arange(width)
    used = ranks < -(-lens // block_size)[:, None]
    places = np.where(used, starts[:, None] + ranks, 0)
    return np.where(used, batch.blocks[places], spare_block), lens
