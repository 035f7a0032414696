"""The kernel of a linear layer: packed once at load, chosen by device, weight format and number of rows.

Engine process. On a CPU the choice is worth a factor of 3 to 6, and decides batch invariance:

* bfloat16: oneDNN, weights and activations rounded to bfloat16, sums float32, results bfloat16. Where the CPU
  multiplies bfloat16 (AVX512-BF16), twice as fast as the others in prefill and large batches.
* float16: FBGEMM, weights rounded to float16, activations and sums float32. The closest to float32 of those that
  read half as many bytes; a row's last bits depend on its batch.
* float32: a kernel of our own, ``panel_linear.py``, at any number of rows. A row's result is bitwise the same at any
  batch size and place; oneDNN's is so on some CPUs, and not for every size on others.
* int8: FBGEMM, weights rounded per output channel, activations per row.

Kernels of our own take their place

* where the CPU has a matrix unit: for bfloat16, at any number of rows, see ``tile_linear.py``. All products of a model
  of 135M parameters take 12, 14 and 20 ms for 1, 8 and 32 rows (at 22 GB/s), oneDNN's 28, 28 and 46.
* else for a few rows of a small matrix, where the time goes to starting the call, and to pauses in reading. bfloat16
  and float16 have a copy of the weights for ``kernels/linear.py``: one row takes 16 ms where FBGEMM takes 22 and oneDNN
  28, four rows 19 against 26 and 28 (at 20 GB/s).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.torch_core.kernels.calls import Kernels
from engine.torch_core.panel_linear import PanelLinear
from engine.torch_core.tile_linear import TileGate, TileLinear

Linear = Callable[[Tensor], Tensor]  # (num_rows, in_features) float -> (num_rows, out_features); may round to bfloat16

CPU_FORMATS = ("bfloat16", "float16", "float32", "int8")
FEW_ROWS = {"bfloat16": 8, "float16": 4}
SMALL_MATRIX = 2**22  # elements


def pack_linear(weight: Tensor, bias: Tensor | None, weight_format: str, kernels: Kernels | None) -> Linear:
    """A linear layer from float32 ``weight`` (out_features, in_features) in a CPU format, or "plain": as it is.

    ``kernels`` are for a CPU.
    """
    if weight_format == "int8":
        return _Int8Linear(weight, bias)
    if kernels is not None and input_dtype(weight_format, kernels) is torch.bfloat16:
        return TileLinear(weight, bias, kernels)
    if weight_format == "float32" and kernels is not None:
        return PanelLinear(weight, bias, kernels, torch.float32)
    if weight_format == "bfloat16":
        many = _pack_onednn(weight, bias)
    elif weight_format == "float16":
        packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        many = partial(_fbgemm, packed)
    else:
        return lambda x: F.linear(x, weight, bias)
    if weight.numel() > SMALL_MATRIX or kernels is None:
        return many
    return _by_rows(PanelLinear(weight, bias, kernels), many, weight_format)


def pack_head(weight: Tensor, weight_format: str, kernels: Kernels | None) -> Linear:
    """The layer of the logits: a row for each sequence, seldom more, and results that are not rounded to bfloat16,
    where the greatest would often tie.
    """
    if kernels is None or weight_format not in FEW_ROWS or input_dtype(weight_format, kernels) is torch.bfloat16:
        return pack_linear(weight, None, weight_format, kernels)
    return PanelLinear(weight, None, kernels)


def pack_gate(
    gate: Tensor,
    up: Tensor,
    biases: tuple[Tensor, Tensor] | None,
    weight_format: str,
    kernels: Kernels | None,
    join: Callable[[Tensor], Tensor],
) -> Linear:
    """silu(gate x) * (up x), of two weights (intermediate_size, in_features), both with a bias or both without.

    ``join`` does so with both results side by side, see ``RowOps.gate``.
    """
    if kernels is not None and input_dtype(weight_format, kernels) is torch.bfloat16:
        return TileGate(gate, up, biases, kernels)
    both, both_biases = torch.cat([gate, up]), torch.cat(biases) if biases else None
    if weight_format != "bfloat16":
        joined = pack_linear(both, both_biases, weight_format, kernels)
        return lambda x: join(joined(x))
    gate_bias, up_bias = biases or (None, None)  # the kernels apply both functions to their float32 sums
    silu = _pack_onednn(gate, gate_bias, "swish")
    many = _pack_onednn_product(up, up_bias, silu)
    if both.numel() > SMALL_MATRIX or kernels is None:
        return many
    few = PanelLinear(both, both_biases, kernels)
    return _by_rows(lambda x: join(few(x)), many, weight_format)


def input_dtype(weight_format: str, kernels: Kernels) -> torch.dtype:
    """What linear layers of this format round their inputs to first: bfloat16 by the CPU's matrix unit."""
    return torch.bfloat16 if weight_format == "bfloat16" and kernels.has_tiles else torch.float32


def has_bfloat16_products() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # older versions cannot tell
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _by_rows(few: Linear, many: Linear, weight_format: str) -> Linear:
    limit = FEW_ROWS[weight_format]
    return lambda x: few(x) if x.size(0) <= limit else many(x)


def _fbgemm(packed: Any, x: Tensor) -> Tensor:
    output: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, packed)
    return output


def _pack_onednn(weight: Tensor, bias: Tensor | None, function: str = "none") -> Linear:
    packed, bias = _reordered(weight, bias)
    scalars = [1.0] if function == "swish" else []
    return lambda x: torch.ops.mkldnn._linear_pointwise(x.bfloat16(), packed, bias, function, scalars, "")


def _pack_onednn_product(weight: Tensor, bias: Tensor | None, factor: Linear) -> Linear:
    packed, bias = _reordered(weight, bias)

    def product(x: Tensor) -> Tensor:
        x = x.bfloat16()
        output: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, factor(x), packed, bias, "mul")
        return output

    return product


def _reordered(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), 32)
    return packed, None if bias is None else bias.bfloat16()


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
