"""CUDA graphs for decode: one for each bucket of (rows, width), recorded when first needed.

Engine process. A decode step of a small model launches hundreds of short kernels, and the CPU's launches are its
whole time; a recorded graph is one launch. Rows and width (blocks of context) are rounded up to powers of two;
padding rows read and write a spare block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.torch_core.attention_cuda import DecodeRows, GatherAttention, padded_tables
from engine.torch_core.batch import StepBatch
from engine.torch_core.model import Model

MAX_ROWS = 512


@dataclass(slots=True)
class _Recorded:
    inputs: Tensor  # (4, rows) int64: token ids, positions, write blocks, write offsets
    rows: DecodeRows
    hidden: Tensor  # (rows, hidden_size), the result
    graph: torch.cuda.CUDAGraph | None  # None: nothing is recorded, every replay computes


class DecodeGraphs:
    """Runs steps that consist of decodes alone."""

    def __init__(self, model: Model, attention: GatherAttention, record: bool) -> None:
        self._model = model
        self._attention = attention
        self._record = record  # False: the same padding and buffers without a graph, to test on a CPU
        self._recorded: dict[tuple[int, int], _Recorded] = {}

    def run(self, batch: StepBatch, token_ids: Tensor) -> Tensor | None:
        """Hidden states of the batch's rows, of ``token_ids`` on the device; None where the step is no plain decode."""
        num_rows = len(batch.token_ids)
        if batch.prefills or num_rows > MAX_ROWS:
            return None
        width = max(group.width for group in batch.groups)
        bucket = (1 << (num_rows - 1).bit_length(), width)
        recorded = self._recorded.get(bucket)
        if recorded is None:
            recorded = self._recorded[bucket] = self._prepare(*bucket)
        self._fill(recorded, batch, num_rows, width)
        recorded.inputs[0, :num_rows].copy_(token_ids)
        if recorded.graph is not None:
            recorded.graph.replay()
        else:
            recorded.hidden.copy_(self._compute(recorded.inputs, recorded.rows))
        return recorded.hidden[:num_rows]

    def _fill(self, recorded: _Recorded, batch: StepBatch, num_rows: int, width: int) -> None:
        attention = self._attention
        tables, lens = padded_tables(batch, 0, num_rows, width, attention.spare_block, attention.block_size)
        inputs = np.stack([batch.token_ids, batch.positions, batch.write_blocks, batch.write_offsets])
        recorded.inputs[:, :num_rows].copy_(attention.upload(inputs), non_blocking=True)
        recorded.inputs[2, num_rows:] = attention.spare_block
        recorded.rows.tables[:num_rows].copy_(attention.upload(tables), non_blocking=True)
        recorded.rows.tables[num_rows:] = attention.spare_block
        recorded.rows.context_lens[:num_rows].copy_(attention.upload(lens), non_blocking=True)
        recorded.rows.context_lens[num_rows:] = 1

    def _prepare(self, num_rows: int, width: int) -> _Recorded:
        device = self._attention.device
        inputs = torch.zeros(4, num_rows, dtype=torch.long, device=device)
        inputs[2] = self._attention.spare_block
        tables = torch.full((num_rows, width), self._attention.spare_block, device=device)
        rows = DecodeRows(0, num_rows, tables, torch.ones(num_rows, dtype=torch.long, device=device))
        hidden = self._compute(inputs, rows)
        if not self._record:
            return _Recorded(inputs, rows, hidden, None)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels choose their algorithms before the recording
            for _ in range(2):
                self._compute(inputs, rows)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hidden = self._compute(inputs, rows)
        return _Recorded(inputs, rows, hidden, graph)

    def _compute(self, inputs: Tensor, rows: DecodeRows) -> Tensor:
        self._attention.begin_static((inputs[2], inputs[3]), rows)
        return self._model.forward(inputs[0], inputs[1], self._attention)
