"""What a layer does with its rows besides products and attention: norms and rotary positions.

Engine process. By torch on a GPU, by compiled kernels on a CPU: there an operation of torch on one row takes 2 us,
whatever it computes, and a layer had 30 of them.
"""

from __future__ import annotations

import struct
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.torch_core.kernels.calls import Kernels
from engine.torch_core.model_spec import ModelSpec

SHARE_ROWS_FROM = 16  # fewer take less time than to wake a thread


class RowOps(Protocol):
    """Of one model on one device."""

    def begin(self, positions: Tensor) -> None:
        """Prepare for a step's rows at these positions, (num_rows,) int64."""

    def begin_layer(self) -> None:
        """A layer begins, which needs nothing that was returned before the last one."""

    def norm(self, x: Tensor, weight: Tensor, delta: Tensor | None = None) -> Tensor:
        """x (num_rows, size) += delta; returns x over its root mean square, times weight (size,): (num_rows, size)."""

    def rotate(self, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> None:
        """Rotate queries and keys of qkv (num_rows, num_heads + 2 num_kv_heads, head_dim) in place.

        q_norm, k_norm (head_dim,): each head is normed before, and multiplied by them.
        """


def rotations_of(spec: ModelSpec, max_len: int) -> Tensor:
    """How each pair of dimensions turns at each position: (max_len, head_dim / 2) complex64."""
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * torch.from_numpy(spec.inv_freq)
    return torch.polar(torch.full_like(angles, spec.rope_scale), angles)


class TorchRowOps:
    """On any device, by torch."""

    def __init__(self, spec: ModelSpec, max_len: int, device: torch.device) -> None:
        self._spec = spec
        self._table = rotations_of(spec, max_len).unsqueeze(1).to(device)
        self._rotations: Tensor  # (num_rows, 1, head_dim / 2)

    def begin(self, positions: Tensor) -> None:
        """See RowOps."""
        self._rotations = self._table.index_select(0, positions)

    def begin_layer(self) -> None:
        """See RowOps."""

    def norm(self, x: Tensor, weight: Tensor, delta: Tensor | None = None) -> Tensor:
        """See RowOps."""
        if delta is not None:
            x.add_(delta)
        return F.rms_norm(x, (x.shape[-1],), weight, self._spec.rms_eps)

    def rotate(self, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> None:
        """See RowOps."""
        num_q, num_rotated = self._spec.num_heads, self._spec.num_heads + self._spec.num_kv_heads
        if q_norm is not None and k_norm is not None:
            qkv[:, :num_q] = self.norm(qkv[:, :num_q], q_norm)
            qkv[:, num_q:num_rotated] = self.norm(qkv[:, num_q:num_rotated], k_norm)
        rotated = qkv[:, :num_rotated]
        # There are no complex numbers of half precision that all kernels know.
        pairs = torch.view_as_complex(rotated.float().view(*rotated.shape[:2], -1, 2))
        rotated.copy_(torch.view_as_real(pairs * self._rotations).flatten(-2))


class CompiledRowOps:
    """On a CPU, in float32; tensors are contiguous."""

    def __init__(
        self, spec: ModelSpec, max_len: int, kernels: Kernels, norm_dtype: torch.dtype = torch.float32
    ) -> None:
        """``norm_dtype``: of what ``norm`` returns, float32 or bfloat16."""
        self._table = torch.view_as_real(rotations_of(spec, max_len)).contiguous()
        self._positions: Tensor
        self._eps = struct.unpack("q", struct.pack("d", spec.rms_eps))[0]  # its bits
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._kernels = kernels
        self._norm_dtype = norm_dtype
        self._norm = kernels.kernel(f"add_norm_{str(norm_dtype).removeprefix('torch.')}", SHARE_ROWS_FROM, runs=1)
        self._rotate = kernels.kernel("rotate", SHARE_ROWS_FROM, runs=1)

    def begin(self, positions: Tensor) -> None:
        """See RowOps."""
        self._positions = positions

    def begin_layer(self) -> None:
        """See RowOps."""
        self._kernels.begin_layer()

    def norm(self, x: Tensor, weight: Tensor, delta: Tensor | None = None) -> Tensor:
        """See RowOps."""
        num_rows, size = x.shape
        output = self._kernels.empty(num_rows, size, self._norm_dtype)
        delta = None if delta is None else delta.float()
        addresses = (x.data_ptr(), _address(delta), weight.data_ptr(), output.data_ptr())
        self._norm(num_rows, size, self._eps, *addresses)
        return output

    def rotate(self, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> None:
        """See RowOps."""
        self._rotate(
            qkv.size(0),
            *self._heads,
            self._positions.data_ptr(),
            self._table.data_ptr(),
            self._eps,
            _address(q_norm),
            _address(k_norm),
            qkv.data_ptr(),
        )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
