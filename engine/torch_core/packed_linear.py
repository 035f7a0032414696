"""Linear layers whose weights are packed for kernels of our own, for any number of rows. Engine process, CPU.

One copy of the weights serves a decode of one row as well as a prefill, and a row's result is bitwise the same at any
batch size and place. Weights are float16 or float32, see ``kernels/linear.py``, int8 with scales, see
``kernels/int8_linear.py``, or bfloat16 where the CPU has a matrix unit, which rounds the inputs alike, see
``kernels/tile_linear.py``. Sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.torch_core.kernels.calls import Kernels
from engine.torch_core.kernels.layout import GROUP, PANEL, TILE_DEPTH, TILE_PANEL, TILE_ROWS

GREATEST = 127  # of the numbers that stand for weights of int8
RUNS = 4  # of panels, for each thread: what follows a run is fetched in vain


class PackedLinear:
    """x (num_rows, in_features) -> (num_rows, out_features) float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: Kernels, dtype: torch.dtype) -> None:
        """weight (out_features, in_features), bias (out_features,); ``dtype``: that weights are rounded to."""
        self._kernels = kernels
        self._out_features = len(weight)
        if bias is None:
            bias = torch.zeros(len(weight))
        missing = -len(weight) % LAYOUTS[dtype].panel
        self._product = _Product("linear", _padded(weight, missing, 0), F.pad(bias, (0, missing)), kernels, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        output = self._kernels.empty(x.size(0), self._product.num_columns)
        return _without_padding(self._product(x, output), self._out_features)


class PackedGate:
    """x (num_rows, in_features) -> silu(gate x) * (up x), (num_rows, intermediate_size) float32 or, for weights of
    bfloat16, bfloat16.
    """

    def __init__(
        self, gate: Tensor, up: Tensor, biases: tuple[Tensor, Tensor] | None, kernels: Kernels, dtype: torch.dtype
    ) -> None:
        """gate, up (intermediate_size, in_features), biases (intermediate_size,)."""
        self._kernels = kernels
        self._size = len(gate)
        half = LAYOUTS[dtype].panel // 2
        missing = -len(gate) % half
        gate_bias, up_bias = biases or (torch.zeros(len(gate)), torch.zeros(len(gate)))
        weight = _alternating(half, *(_padded(weight, missing, 0) for weight in (gate, up)))
        bias = _alternating(half, *(F.pad(bias, (0, missing)) for bias in (gate_bias, up_bias)))
        self._product = _Product("gate", weight, bias, kernels, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        output = self._kernels.empty(x.size(0), self._product.num_columns // 2, self._product.input_dtype)
        return _without_padding(self._product(x, output), self._size)


@dataclass(frozen=True, slots=True)
class _Layout:
    input_dtype: torch.dtype
    panel: int  # columns that are stored side by side
    depth: int  # in_features is padded to a multiple of it
    row_block_bytes: int  # of a layer's input, to stay in a core's cache
    rows: int  # that the kernel computes at once, or a multiple: a block has a multiple of it
    arrange: Callable[[Tensor], Tensor]  # (num_panels, panel, in_features) float32 rounded, as the kernel reads it


def _columns(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda panels: panels.to(dtype).transpose(1, 2)


def _groups(panels: Tensor) -> Tensor:
    groups = _padded(panels, 0, -panels.size(2) % GROUP).view(len(panels), PANEL, -1, GROUP).transpose(1, 2)
    scales = (groups.abs().amax(3) / GREATEST).clamp_min_(torch.finfo(torch.float32).tiny).bfloat16()
    numbers = (groups / scales.float().unsqueeze(3)).round_().clamp_(-GREATEST, GREATEST).to(torch.int8)
    return torch.cat([scales.view(torch.int8), numbers.transpose(2, 3).flatten(2)], dim=2)


def _tiles(panels: Tensor) -> Tensor:
    return panels.bfloat16().view(len(panels), 2, TILE_ROWS, -1, TILE_DEPTH // 2, 2).permute(0, 3, 1, 4, 2, 5)


LAYOUTS = {
    torch.float16: _Layout(torch.float32, PANEL, 1, 2**18, 12, _columns(torch.float16)),
    torch.float32: _Layout(torch.float32, PANEL, 1, 2**18, 12, _columns(torch.float32)),
    torch.int8: _Layout(torch.float32, PANEL, 1, 2**18, 12, _groups),
    torch.bfloat16: _Layout(torch.bfloat16, TILE_PANEL, TILE_DEPTH, 2**20, 2 * TILE_ROWS, _tiles),
}


class _Product:
    """Weights and bias as the kernels want them, with a call of one."""

    def __init__(self, kernel: str, weight: Tensor, bias: Tensor, kernels: Kernels, dtype: torch.dtype) -> None:
        """weight (panel * num_panels, in_features) float32, bias (panel * num_panels,)."""
        layout = LAYOUTS[dtype]
        self.input_dtype = layout.input_dtype
        self._padding = -weight.size(1) % layout.depth
        self.num_columns = len(weight)
        self._num_panels = len(weight) // layout.panel
        self._in_features = weight.size(1) + self._padding
        panels = _padded(weight, 0, self._padding).view(self._num_panels, layout.panel, self._in_features)
        self._weight = layout.arrange(panels).contiguous()
        self._bias = bias.float().contiguous()
        self._addresses = (self._weight.data_ptr(), self._bias.data_ptr())
        most_rows = layout.row_block_bytes // (layout.input_dtype.itemsize * self._in_features)
        self._row_block = max(1, most_rows // layout.rows) * layout.rows
        self._kernel = kernels.kernel(f"{kernel}_{str(dtype).removeprefix('torch.')}", 2, runs=RUNS)

    def __call__(self, x: Tensor, output: Tensor) -> Tensor:
        x = x.to(self.input_dtype)
        if self._padding:
            x = F.pad(x, (0, self._padding))
        num_rows = x.size(0)
        num_tasks = self._num_panels * -(-num_rows // self._row_block)
        sizes = (num_rows, self._in_features, self._num_panels, self._row_block)
        self._kernel(num_tasks, *sizes, *self._addresses, x.data_ptr(), output.data_ptr())
        return output


def _padded(weight: Tensor, rows: int, columns: int) -> Tensor:
    """With so many more of zeros; itself, where none are missing, since a copy may be large."""
    return F.pad(weight, (0, columns, 0, rows)) if rows or columns else weight


def _alternating(half: int, gate: Tensor, up: Tensor) -> Tensor:
    """Half a panel of one and of the other in turn."""
    pair = [tensor.reshape(-1, half, *tensor.shape[1:]) for tensor in (gate, up)]
    return torch.stack(pair, dim=1).flatten(0, 2)


def _without_padding(output: Tensor, size: int) -> Tensor:
    return output if output.size(1) == size else output[:, :size].contiguous()
