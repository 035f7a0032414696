"""CUDA graphs for decode: one for each bucket of (rows, width), recorded at the start or when first needed.

Engine process. A decode step of a small model launches hundreds of short kernels, and the CPU's launches are its
whole time; a recorded graph is one launch. Rows and width (blocks of context) are rounded up to powers of two;
padding rows read and write a spare block.

All graphs take their memory from one pool: they run one after the other on one stream, so the next may overwrite
what the last one computed, but for its result, which stays allocated. The inputs of a step are copied into the
graph's own buffer on that stream too, after the run before has read it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.torch_core.attention_cuda import DecodeRows, PagedAttention, padded_tables, slots_of
from engine.torch_core.batch import StepBatch
from engine.torch_core.model import Model
from engine.torch_core.transfer import upload, upload_into

MAX_ROWS = 512
WARM_UP_RUNS = 2  # kernels choose their algorithms, and compile, before the recording


class _Bucket:
    """The buffers of one size, and the computation over them."""

    def __init__(self, num_rows: int, width: int, spare_block: int, block_size: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.width = width
        # Of rows that are padding: position 0, the spare block's first slot, a context of one token, the spare block.
        self._padding = np.zeros((3 + width) * num_rows, np.int64)
        _, slots, lens, tables = self._views(self._padding)
        slots[:] = spare_block * block_size
        lens[:] = 1
        tables[:] = spare_block
        self._buffer = upload(self._padding.copy(), device)
        self.token_ids = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.positions, self.slots, context_lens, tables = self._views(self._buffer)
        self.rows = DecodeRows(0, num_rows, tables.view(num_rows, width), context_lens)
        self.hidden: Tensor  # (num_rows, hidden_size), the result
        self.graph: torch.cuda.CUDAGraph | None = None  # None: nothing is recorded, every run computes

    def fill(self, batch: StepBatch, token_ids: Tensor, spare_block: int, block_size: int) -> None:
        """Queue the copies of a step's inputs: one from the host, one on the device."""
        count = len(batch.token_ids)
        values = self._padding.copy()
        positions, slots, lens, tables = self._views(values)
        positions[:count] = batch.positions
        slots[:count] = slots_of(batch, block_size)
        tables.reshape(self.num_rows, self.width)[:count], lens[:count] = padded_tables(
            batch, 0, count, self.width, spare_block, block_size
        )
        upload_into(self._buffer, values)
        self.token_ids[:count].copy_(token_ids)

    def _views(self, flat: Any) -> tuple[Any, Any, Any, Any]:
        """Positions, slots, context lengths and block tables within the one array that is copied."""
        n = self.num_rows
        return flat[:n], flat[n : 2 * n], flat[2 * n : 3 * n], flat[3 * n :]


class DecodeGraphs:
    """Runs steps that consist of decodes alone."""

    def __init__(self, model: Model, attention: PagedAttention, record: bool) -> None:
        self._model = model
        self._attention = attention
        self._record = record  # False: the same padding and buffers without a graph, to test on a CPU
        self._pool: Any = torch.cuda.graph_pool_handle() if record else None
        self._buckets: dict[tuple[int, int], _Bucket] = {}

    def run(self, batch: StepBatch, token_ids: Tensor) -> Tensor | None:
        """Hidden states of the batch's rows, of ``token_ids`` on the device; None where the step is no plain decode.

        They are good until the next run.
        """
        self._attention.empty_new_blocks(batch)
        num_rows = len(batch.token_ids)
        width = 0 if batch.prefills or num_rows > MAX_ROWS else self._attention.graph_width(batch)
        if not width:
            return None
        bucket = self._bucket(num_rows, width)
        bucket.fill(batch, token_ids, self._attention.spare_block, self._attention.block_size)
        if bucket.graph is not None:
            bucket.graph.replay()
        else:
            bucket.hidden = self._compute(bucket)
        return bucket.hidden[:num_rows]

    @torch.inference_mode()
    def record_all(self, max_rows: int) -> None:
        """Record every size up to so many rows now, where all have one width, so that no step waits for it."""
        if self._attention.fixed_width:
            for exponent in range((min(max_rows, MAX_ROWS) - 1).bit_length() + 1):
                self._bucket(1 << exponent, self._attention.fixed_width)

    def _bucket(self, num_rows: int, width: int) -> _Bucket:
        """The bucket that has room for a step, recorded now if it is new."""
        size = (1 << (num_rows - 1).bit_length(), width)
        if size not in self._buckets:
            attention = self._attention
            bucket = _Bucket(*size, attention.spare_block, attention.block_size, attention.device)
            if self._record:
                self._capture(bucket)
            self._buckets[size] = bucket
        return self._buckets[size]

    def _capture(self, bucket: _Bucket) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                self._compute(bucket)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            bucket.hidden = self._compute(bucket)
        bucket.graph = graph

    def _compute(self, bucket: _Bucket) -> Tensor:
        self._attention.begin_static(bucket.slots, bucket.rows)
        return self._model.forward(bucket.token_ids, bucket.positions, self._attention)
