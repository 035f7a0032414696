"""Steps on a CPU as lists of kernels' calls: recorded when a number of rows is first computed, then repeated.

Engine process, CPU. What CUDA graphs are on a GPU, see ``decode_graphs.py``. A step can be recorded where kernels of
our own compute all of it; where torch computes a part, every step runs through Python as before.
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

MAX_ROWS = 64  # with more, Python's part of a step is small


class RecordedSteps:
    """Runs steps without prefills: decodes, and chunks that are short enough for lookup."""

    def __init__(self, model: Model, attention: CpuAttention, kernels: Kernels) -> None:
        self._model = model
        self._attention = attention
        self._kernels = kernels
        self._recorder = Recorder(MAX_ROWS)
        # By number of rows, and whether any has more than one segment; None: torch computes a part.
        self._recorded: dict[tuple[int, bool], tuple[Recording, Tensor] | None] = {}

    def run(self, batch: StepBatch, token_ids: Tensor) -> Tensor | None:
        """Hidden states (num_rows, hidden_size) of ``token_ids``; None where the step is not to be recorded."""
        num_rows = len(batch.token_ids)
        if batch.prefills or num_rows > MAX_ROWS:
            return None
        attention = self._attention
        attention.begin(batch)
        x, positions = self._model.embed(token_ids), torch.from_numpy(batch.positions)
        inputs = (x.data_ptr(), positions.data_ptr(), *attention.inputs)
        size = (num_rows, attention.is_split)
        if size not in self._recorded:
            delta, self._recorded[size] = self._record(x, positions, inputs)
        elif (recorded := self._recorded[size]) is None:
            delta = self._model.layers(x, positions, attention)
        else:
            recording, delta = recorded
            recording.prepare(inputs, attention.num_tasks)
            self._kernels.repeat(recording)
        return x.add_(delta)

    def _record(
        self, x: Tensor, positions: Tensor, inputs: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Recording, Tensor] | None]:
        """The layers' result, and how to have it again."""
        self._recorder.begin()
        with self._kernels.recording(self._recorder), _Watch() as watch:
            delta = self._model.layers(x, positions, self._attention)
        return delta, None if watch.computes else (Recording(self._recorder.calls, inputs), delta)


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
