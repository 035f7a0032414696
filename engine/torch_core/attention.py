"""Attention over the paged KV cache on a CPU.

Engine process. A row of a decode, or of a short chunk, attends by itself, see ``kernels/paged_attention.py``; so does
any row in the deterministic mode. The rows of a long prefill chunk attend many at a time, by the CPU's matrix unit, see
``kernels/tile_attention.py``, or without one, see ``kernels/prefill_attention.py``. All read the blocks of their
context where they are.

Number formats follow that of the weights. With float32 weights everything is float32. Else the cache holds float16;
sums are float32. It costs a KL divergence of 3e-6 (bfloat16, with as many bytes, 1.6e-4). Keys and values beyond 65504
are stored as that: a model that has any needs float32 weights.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.torch_core.batch import PrefillRun, StepBatch
from engine.torch_core.kernels.calls import Kernels
from engine.torch_core.kernels.layout import QUERY_BLOCK, TILE_DEPTH, attend_bytes, attend_tiles_bytes
from engine.torch_core.linear import input_dtype
from engine.torch_core.model_spec import ModelSpec
from engine.torch_core.row_ops import SHARE_ROWS_FROM

MAX_LOOKUP_TOKENS = 4  # longer chunks are prefilled
DETERMINISTIC_MAX_TOKENS = 128  # of one step, since each row attends by itself: twice the time of gathered ones
SEGMENT_TOKENS = 512  # of a context that one thread attends to


@dataclass(frozen=True, slots=True)
class _Lookup:
    """Addresses of a step's index arrays for the kernels, and what keeps the arrays alive."""

    num_rows: int
    num_segments: int
    is_split: bool  # whether a row has more than one segment
    partials: Tensor  # (num_segments, num_heads, head_dim + 2)
    addresses: tuple[int, ...]  # of segment_rows, first_segments, context_lens, block_starts, blocks
    arrays: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Prefill:
    run: PrefillRun
    blocks: Tensor


class CpuAttention:
    """The KV cache of all layers and attention over it."""

    def __init__(self, spec: ModelSpec, num_blocks: int, block_size: int, weight_format: str, kernels: Kernels) -> None:
        """See ``linear.input_dtype`` for the dtype of results."""
        self.spec = spec
        self.block_size = block_size
        dtype = _cache_dtype(weight_format)
        heads, dim = spec.num_kv_heads, spec.head_dim
        numel = num_blocks * heads * dim * block_size
        tables = [_mapped_zeros(numel, dtype) for _ in range(2 * spec.num_layers)]
        self._keys = [table.view(num_blocks, heads, dim, block_size) for table in tables[::2]]
        self._values = [table.view(num_blocks, heads, block_size, dim) for table in tables[1::2]]
        self._addresses = [
            (keys.data_ptr(), values.data_ptr()) for keys, values in zip(self._keys, self._values, strict=True)
        ]
        self.output_dtype = input_dtype(weight_format, kernels)
        cache, output = (str(name).removeprefix("torch.") for name in (dtype, self.output_dtype))
        self._store = kernels.kernel(f"store_{cache}", SHARE_ROWS_FROM, runs=1)
        self._attend_name = f"attend_{cache}_{output}"
        self._attend = kernels.kernel(self._attend_name, 2)
        self._merge = kernels.kernel(f"merge_{output}", SHARE_ROWS_FROM, runs=1)
        self._segment = max(1, SEGMENT_TOKENS // block_size) * block_size
        group = spec.num_heads // heads
        self._workspaces = torch.empty(kernels.num_threads, group, 2 * dim + block_size + 2)
        self.attends_by_tiles = self.output_dtype is torch.bfloat16 and dim % TILE_DEPTH == block_size % TILE_DEPTH == 0
        name, size_of = f"attend_prompt_{cache}_{output}", attend_bytes
        if self.attends_by_tiles:
            name, size_of = "attend_tiles", attend_tiles_bytes
        self._attend_prompt = kernels.kernel(name, 2)
        self._prompt_workspaces = torch.empty(kernels.num_threads, size_of(group, dim, block_size), dtype=torch.uint8)
        self._write_to: tuple[Tensor, Tensor]
        self._output: Tensor  # (num_rows, num_heads * head_dim), of one layer after the other
        self._lookup: _Lookup
        self._prefills: list[_Prefill] = []

    @property
    def inputs(self) -> tuple[int, ...]:
        """Addresses of what a step without prefills gives to its kernels; all different."""
        blocks, offsets = self._write_to
        lookup = self._lookup
        own = (blocks, offsets, lookup.partials, self._output)
        return (*(tensor.data_ptr() for tensor in own), *lookup.addresses)

    @property
    def num_tasks(self) -> dict[str, int]:
        """Of the kernels whose number of tasks follows from more than the number of rows; see ``is_split``."""
        return {self._attend_name: self._lookup.num_segments * self.spec.num_kv_heads}

    @property
    def is_split(self) -> bool:
        """Whether a row of the step has more than one segment, which takes a call more."""
        return self._lookup.is_split

    @staticmethod
    def bytes_per_token(spec: ModelSpec, weight_format: str) -> int:
        """Size of one token's keys and values in all layers."""
        return 2 * _cache_dtype(weight_format).itemsize * spec.num_layers * spec.num_kv_heads * spec.head_dim

    def begin(self, batch: StepBatch) -> None:
        """Build a step's index arrays, which all layers share."""
        self._write_to = (torch.from_numpy(batch.write_blocks), torch.from_numpy(batch.write_offsets))
        size = self.spec.num_heads * self.spec.head_dim
        self._output = torch.empty(len(batch.positions), size, dtype=self.output_dtype)
        self._lookup = self._plan_lookup(batch)
        self._prefills = [_Prefill(run, torch.from_numpy(run.blocks)) for run in batch.prefills]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store the rows' keys and values, then attend.

        query (num_rows, num_heads, head_dim), key and value (num_rows, num_kv_heads, head_dim), float32, rotated, their
        rows contiguous; returns (num_rows, num_heads * head_dim), which the next layer's replaces.
        """
        spec = self.spec
        blocks, offsets = self._write_to
        num_rows, keys_and_values = query.size(0), self._addresses[layer]
        self._store(
            num_rows,
            spec.num_kv_heads,
            spec.head_dim,
            self.block_size,
            key.stride(0),
            blocks.data_ptr(),
            offsets.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            *keys_and_values,
        )
        if self._lookup.num_rows:
            self._look_up(self._lookup, query, keys_and_values)
        for prefill in self._prefills:
            self._prefill(prefill, query, keys_and_values)
        return self._output

    def _look_up(self, lookup: _Lookup, query: Tensor, keys_and_values: tuple[int, int]) -> None:
        spec = self.spec
        partials, output = lookup.partials.data_ptr(), self._output.data_ptr()
        self._attend(
            lookup.num_segments * spec.num_kv_heads,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            self.block_size,
            self._segment,
            query.stride(0),
            *lookup.addresses,
            query.data_ptr(),
            *keys_and_values,
            self._workspaces.data_ptr(),
            partials,
            output,
        )
        if lookup.is_split:
            _, first_segments, context_lens, *_ = lookup.addresses
            num_tasks = lookup.num_rows * spec.num_heads
            lens = (spec.num_heads, spec.head_dim, self._segment)
            self._merge(num_tasks, *lens, first_segments, context_lens, partials, output)

    def _prefill(self, prefill: _Prefill, query: Tensor, keys_and_values: tuple[int, int]) -> None:
        spec, run = self.spec, prefill.run
        num_rows = run.hi - run.lo
        self._attend_prompt(
            -(-num_rows // QUERY_BLOCK) * spec.num_kv_heads,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            self.block_size,
            num_rows,
            run.start,
            query.stride(0),
            prefill.blocks.data_ptr(),
            query[run.lo].data_ptr(),
            *keys_and_values,
            self._prompt_workspaces.data_ptr(),
            self._output[run.lo].data_ptr(),
        )

    def _plan_lookup(self, batch: StepBatch) -> _Lookup:
        spec = self.spec
        num_segments = (batch.context_lens - 1) // self._segment + 1
        segment_rows = np.repeat(np.arange(len(num_segments)), num_segments)
        first_segments = np.cumsum(num_segments) - num_segments
        arrays = tuple(
            torch.from_numpy(array)
            for array in (segment_rows, first_segments, batch.context_lens, batch.block_starts, batch.blocks)
        )
        return _Lookup(
            num_rows=len(num_segments),
            num_segments=len(segment_rows),
            is_split=len(segment_rows) > len(num_segments),
            partials=torch.empty(len(segment_rows), spec.num_heads, spec.head_dim + 2),
            addresses=tuple(array.data_ptr() for array in arrays),
            arrays=arrays,
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
