"""The kernel of a linear layer: packed once at load, chosen by device, weight format and number of rows.

Engine process. On a CPU the choice is worth a factor of 3 to 6, and decides batch invariance:

* float16 and float32: kernels of our own, see ``packed_linear.py``, at any number of rows; activations and sums are
  float32. A row's result is bitwise the same at any batch size and place; oneDNN's in float32 is so on some CPUs, and
  not for every size on others. float16 is the closest to float32 of those that read half as many bytes.
* bfloat16: weights and activations rounded to bfloat16, sums float32. By kernels of our own where the CPU has a matrix
  unit. Else by oneDNN, whose results are rounded too, but for a few rows of a small matrix, where the time goes to
  starting the call and to pauses in reading: these have a copy of the weights in float16.
* int8: as float32, for weights that are rounded to 8 bits, with a scale for each 32 of an output's. They take half of
  float16's bytes, which the time of a few rows follows.

All products of a model of 135M parameters, two threads, ms at 1, 8, 32 and 256 rows: on a CPU with AVX2 in float16 13,
18, 43 and 370 (FBGEMM: 17, 29, 58 and 400), on one with AMX in bfloat16 12, 14 and 20 at 1, 8 and 32 (oneDNN: 28, 28
and 46).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.torch_core.kernels.calls import Kernels
from engine.torch_core.packed_linear import PackedGate, PackedLinear

Linear = Callable[[Tensor], Tensor]  # (num_rows, in_features) float -> (num_rows, out_features); may round to bfloat16

CPU_FORMATS = ("bfloat16", "float16", "float32", "int8")
FEW_ROWS = 8
SMALL_MATRIX = 2**22  # elements


def pack_linear(weight: Tensor, bias: Tensor | None, weight_format: str, kernels: Kernels | None) -> Linear:
    """A linear layer from float32 ``weight`` (out_features, in_features) in a CPU format, with ``kernels``; or "plain":
    as it is, without.
    """
    if kernels is None:
        return lambda x: F.linear(x, weight, bias)
    if (dtype := _packed_dtype(weight_format, kernels)) is not None:
        return PackedLinear(weight, bias, kernels, dtype)
    many = _pack_onednn(weight, bias)
    if weight.numel() > SMALL_MATRIX:
        return many
    return _by_rows(PackedLinear(weight, bias, kernels, torch.float16), many)


def pack_head(weight: Tensor, weight_format: str, kernels: Kernels | None) -> Linear:
    """The layer of the logits: a row for each sequence, seldom more, and results that are not rounded to bfloat16,
    where the greatest would often tie.
    """
    if kernels is not None and weight_format == "bfloat16" and not kernels.has_tiles:
        weight_format = "float16"
    return pack_linear(weight, None, weight_format, kernels)


def pack_gate(
    gate: Tensor,
    up: Tensor,
    biases: tuple[Tensor, Tensor] | None,
    weight_format: str,
    kernels: Kernels | None,
) -> Linear:
    """silu(gate x) * (up x), of two weights (intermediate_size, in_features), both with a bias or both without."""
    if kernels is None:
        return _plain_gate(torch.cat([gate, up]), torch.cat(biases) if biases else None)
    if (dtype := _packed_dtype(weight_format, kernels)) is not None:
        return PackedGate(gate, up, biases, kernels, dtype)
    gate_bias, up_bias = biases or (None, None)  # oneDNN applies both functions to its float32 sums
    silu = _pack_onednn(gate, gate_bias, "swish")
    many = _pack_onednn_product(up, up_bias, silu)
    if 2 * gate.numel() > SMALL_MATRIX:
        return many
    return _by_rows(PackedGate(gate, up, biases, kernels, torch.float16), many)


def input_dtype(weight_format: str, kernels: Kernels) -> torch.dtype:
    """What linear layers of this format round their inputs to first: bfloat16 by the CPU's matrix unit."""
    return torch.bfloat16 if weight_format == "bfloat16" and kernels.has_tiles else torch.float32


def _packed_dtype(weight_format: str, kernels: Kernels) -> torch.dtype | None:
    """None where there are no kernels of our own for many rows."""
    if weight_format == "bfloat16":
        return torch.bfloat16 if kernels.has_tiles else None
    return {"float16": torch.float16, "float32": torch.float32, "int8": torch.int8}[weight_format]


def has_bfloat16_products() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32."""
    return _has("avx512_bf16") or _has("amx_bf16")


def can_bfloat16(kernels: Kernels) -> bool:
    """Whether there is code for this CPU to multiply bfloat16, however slow."""
    return kernels.has_tiles or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _has(capability: str) -> bool:
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # older versions cannot tell
    return bool(capabilities.get(capability))


def _by_rows(few: Linear, many: Linear) -> Linear:
    return lambda x: few(x) if x.size(0) <= FEW_ROWS else many(x)


def _plain_gate(weight: Tensor, bias: Tensor | None) -> Linear:
    def gate(x: Tensor) -> Tensor:
        gates, ups = F.linear(x, weight, bias).chunk(2, dim=-1)
        return F.silu(gates).mul_(ups)

    return gate


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
