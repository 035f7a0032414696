"""A linear layer of float16 or float32 weights by a compiled kernel. Engine process, CPU.

A row's result is bitwise the same at any batch size and place, since each sum runs in the order of the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.torch_core.kernels.calls import Kernels
from engine.torch_core.kernels.layout import PANEL


class PanelLinear:
    """x (num_rows, in_features) float32 -> (num_rows, out_features) float32, sums in float32."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, kernels: Kernels, dtype: torch.dtype = torch.float16
    ) -> None:
        """weight (out_features, in_features), bias (out_features,); ``dtype``: that weights are rounded to."""
        self._out_features, self._in_features = weight.shape
        self._num_panels = -(-self._out_features // PANEL)
        missing = self._num_panels * PANEL - self._out_features
        panels = F.pad(weight.to(dtype), (0, 0, 0, missing)).view(self._num_panels, PANEL, self._in_features)
        self._weight = panels.transpose(1, 2).contiguous()
        self._bias = torch.zeros(self._num_panels * PANEL)
        if bias is not None:
            self._bias[: self._out_features] = bias
        self._addresses = (self._weight.data_ptr(), self._bias.data_ptr())
        self._kernels = kernels
        self._kernel = kernels.kernel(f"linear_{str(dtype).removeprefix('torch.')}", 2)

    def __call__(self, x: Tensor) -> Tensor:
        num_rows, width = x.size(0), self._num_panels * PANEL
        output = self._kernels.empty(num_rows, width)
        sizes = (num_rows, self._in_features, width)
        self._kernel(self._num_panels, *sizes, *self._addresses, x.data_ptr(), output.data_ptr())
        return output if width == self._out_features else output[:, : self._out_features].contiguous()
