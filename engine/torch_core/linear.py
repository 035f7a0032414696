"""The kernel of a linear layer: packed once at load, chosen by device and weight format.

Engine process. On a CPU the choice is worth a factor of 3 to 6, and decides batch invariance:

* float16: FBGEMM, weights rounded to float16, activations and sums float32. The fastest that keeps the text; a
  row's last bits depend on its batch.
* float32: oneDNN, weights reordered for it. A row's result is bitwise the same at any batch size and place.
* int8: FBGEMM, weights rounded per output channel, activations per row.

At every number of rows the float16 kernel is at least as fast as the float32 one (measured from 1 to 512), so one
packed copy serves decode and prefill.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Linear = Callable[[Tensor], Tensor]  # (num_rows, in_features) -> (num_rows, out_features)

CPU_FORMATS = ("float16", "float32", "int8")


def pack_linear(weight: Tensor, bias: Tensor | None, weight_format: str) -> Linear:
    """A linear layer from float32 ``weight`` (out_features, in_features) in a CPU format, or "plain": as it is."""
    if weight_format == "float16":
        packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        return lambda x: torch.ops.quantized.linear_dynamic_fp16(x, packed)
    if weight_format == "int8":
        return _Int8Linear(weight, bias)
    if weight_format == "float32":
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return lambda x: F.linear(x, weight, bias)


class _Int8Linear:
    """The kernel quantizes the whole batch with one scale; scaling each row to 1 before gives each row its own."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack(_quantize(weight), None)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        scales = x.abs().amax(dim=-1, keepdim=True).clamp_min_(1e-12)
        output: Tensor = torch.ops.quantized.linear_dynamic(x / scales, self._packed).mul_(scales)
        return output if self._bias is None else output.add_(self._bias)


def _quantize(weight: Tensor) -> Tensor:
    scales = (weight.abs().amax(dim=1).double() / 127).clamp_min(1e-12)
    zero_points = torch.zeros(len(weight), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch announces that it may drop quantized tensors one day
        return torch.quantize_per_channel(weight, scales, zero_points, 0, torch.qint8)
