"""Steps on a CPU as lists of kernels' calls, computed at once, without Python between the calls.

Engine process, CPU. Python takes some 10 us for each call, of which a step has 300, and meanwhile the other threads
fall asleep, which costs more than that. The list of a step without prefills is kept, to be computed again for as many
rows: what CUDA graphs are on a GPU, see ``decode_graphs.py``. Where torch computes a part of a layer there are no such
lists.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.torch_core.attention import CpuAttention
from engine.torch_core.batch import StepBatch
from engine.torch_core.kernels.calls import Kernels
from engine.torch_core.kernels.recording import Recorder, Recording
from engine.torch_core.model import Model

KEPT_ROWS = 64  # of a list that is kept at most; with more, Python's part of a step is small


class RecordedSteps:
    """Runs steps, and keeps lists for later ones: of decodes, and of chunks that are short enough for lookup."""

    def __init__(self, model: Model, attention: CpuAttention, kernels: Kernels, max_rows: int) -> None:
        """``max_rows`` of a step."""
        self._model = model
        self._attention = attention
        self._kernels = kernels
        self._max_rows = max_rows
        self._recorder = Recorder(max_rows)
        self._torch_computes: bool | None = None  # None: not known before the first step
        # By number of rows, and whether any has more than one segment.
        self._kept: dict[tuple[int, bool], tuple[Recording, Tensor]] = {}

    def run(self, batch: StepBatch, token_ids: Tensor) -> Tensor | None:
        """Hidden states (num_rows, hidden_size) of ``token_ids``; None where torch is to compute them."""
        num_rows = len(batch.token_ids)
        if num_rows > self._max_rows or self._torch_computes:
            return None
        attention = self._attention
        attention.begin(batch)
        x, positions = self._model.embed(token_ids), torch.from_numpy(batch.positions)
        if self._torch_computes is None:
            with _Watch() as watch:
                self._record(x, positions)
            self._torch_computes = watch.computes
            return self.run(batch, token_ids)
        inputs = (x.data_ptr(), positions.data_ptr(), *attention.inputs)
        size = (num_rows, attention.is_split)
        is_like_others = not batch.prefills and num_rows <= KEPT_ROWS
        if is_like_others and size in self._kept:
            recording, delta = self._kept[size]
            recording.prepare(inputs, attention.num_tasks)
        else:
            delta = self._record(x, positions)
            recording = Recording(self._recorder.calls, inputs)
            if is_like_others:
                self._kept[size] = recording, delta
        self._kernels.compute(recording)
        return x.add_(delta)

    def _record(self, x: Tensor, positions: Tensor) -> Tensor:
        """Where the layers' result will be."""
        self._recorder.begin()
        with self._kernels.recording(self._recorder):
            return self._model.layers(x, positions, self._attention)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether torch computes anything, or allocates: all but looks at a tensor in another shape."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computes = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler, which takes seconds of every start, to have it leave this alone."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [args[0] if args else None, *(result if isinstance(result, list | tuple) else [result])]
        memory = {tensor.untyped_storage().data_ptr() if isinstance(tensor, Tensor) else None for tensor in tensors}
        self.computes |= func._schema.is_mutable or len(memory) > 1 or None in memory
        return result
