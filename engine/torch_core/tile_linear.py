"""Linear layers of bfloat16 weights by the CPU's matrix unit, for any number of rows. Engine process, CPU.

One copy of the weights serves a decode of one row as well as a prefill, and a row's result is bitwise the same at any
batch size and place. See ``kernels/tile_linear.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.torch_core.kernels.calls import Kernels
from engine.torch_core.kernels.layout import TILE_DEPTH, TILE_ROWS

ROW_BLOCK_BYTES = 2**20  # of a layer's input, to stay in a core's cache
RUNS = 4  # of panels, for each thread: what follows a run is fetched in vain
_PANEL = 2 * TILE_ROWS  # columns


class TileLinear:
    """x (num_rows, in_features) -> (num_rows, out_features) float32, of inputs rounded to bfloat16, sums in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: Kernels) -> None:
        """weight (out_features, in_features), bias (out_features,)."""
        self._kernels = kernels
        self._out_features = len(weight)
        if bias is None:
            bias = torch.zeros(len(weight))
        missing = -len(weight) % _PANEL
        self._product = _Product(
            "tile_linear", F.pad(weight.bfloat16(), (0, 0, 0, missing)), F.pad(bias, (0, missing)), kernels
        )

    def __call__(self, x: Tensor) -> Tensor:
        output = self._kernels.empty(x.size(0), self._product.num_panels * _PANEL)
        return _without_padding(self._product(x, output), self._out_features)


class TileGate:
    """x (num_rows, in_features) -> silu(gate x) * (up x), (num_rows, intermediate_size) bfloat16."""

    def __init__(self, gate: Tensor, up: Tensor, biases: tuple[Tensor, Tensor] | None, kernels: Kernels) -> None:
        """gate, up (intermediate_size, in_features), biases (intermediate_size,)."""
        self._kernels = kernels
        self._size = len(gate)
        missing = -len(gate) % TILE_ROWS
        gate_bias, up_bias = biases or (torch.zeros(len(gate)), torch.zeros(len(gate)))
        weight = _alternating(*(F.pad(weight.bfloat16(), (0, 0, 0, missing)) for weight in (gate, up)))
        bias = _alternating(*(F.pad(bias, (0, missing)) for bias in (gate_bias, up_bias)))
        self._product = _Product("tile_gate", weight, bias, kernels)

    def __call__(self, x: Tensor) -> Tensor:
        output = self._kernels.empty(x.size(0), self._product.num_panels * TILE_ROWS, torch.bfloat16)
        return _without_padding(self._product(x, output), self._size)


class _Product:
    """Weights and bias as the kernels want them, with a call of one."""

    def __init__(self, kernel: str, weight: Tensor, bias: Tensor, kernels: Kernels) -> None:
        """weight (32 num_panels, in_features) bfloat16, bias (32 num_panels,)."""
        self._padding = -weight.size(1) % TILE_DEPTH
        self.num_panels = len(weight) // _PANEL
        self._in_features = weight.size(1) + self._padding
        tiles = F.pad(weight, (0, self._padding))
        tiles = tiles.view(self.num_panels, 2, TILE_ROWS, -1, TILE_DEPTH // 2, 2)
        self._weight = tiles.permute(0, 3, 1, 4, 2, 5).contiguous()
        self._bias = bias.float().contiguous()
        self._addresses = (self._weight.data_ptr(), self._bias.data_ptr())
        most_rows = ROW_BLOCK_BYTES // (2 * self._in_features)
        self._row_block = max(1, most_rows // _PANEL) * _PANEL
        self._kernel = kernels.kernel(kernel, 2, runs=RUNS)

    def __call__(self, x: Tensor, output: Tensor) -> Tensor:
        x = x.to(torch.bfloat16)
        if self._padding:
            x = F.pad(x, (0, self._padding))
        num_rows = x.size(0)
        num_tasks = self.num_panels * -(-num_rows // self._row_block)
        sizes = (num_rows, self._in_features, self.num_panels, self._row_block)
        self._kernel(num_tasks, *sizes, *self._addresses, x.data_ptr(), output.data_ptr())
        return output


def _alternating(gate: Tensor, up: Tensor) -> Tensor:
    """Tiles of one and the other in turn."""
    pair = [tensor.reshape(-1, TILE_ROWS, *tensor.shape[1:]) for tensor in (gate, up)]
    return torch.stack(pair, dim=1).flatten(0, 2)


def _without_padding(output: Tensor, size: int) -> Tensor:
    return output if output.size(1) == size else output[:, :size].contiguous()
