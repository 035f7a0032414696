"""Copies between the host and the device that make neither of them wait.

Engine process. Everything runs on the device's current stream, in the order in which it was queued, so nothing but
the reading of a ``Download`` ever waits. A copy is asynchronous only from and to pinned memory; torch hands a pinned
block out again once the copies that use it have ended. On a CPU both directions are free, and wait for nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(values: npt.ArrayLike, device: torch.device) -> Tensor:
    """A tensor on the device, of the array's shape and type."""
    tensor = torch.from_numpy(np.asarray(values))
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def upload_into(tensor: Tensor, values: npt.NDArray[Any]) -> None:
    """The same into a tensor that exists."""
    host = torch.from_numpy(values)
    tensor.copy_(host.pin_memory() if tensor.is_cuda else host, non_blocking=True)


class Download:
    """Tensors on their way to the host, in the state of the moment at which this was queued."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        self._arrived: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self._tensors = tuple(_pinned_copy(tensor) for tensor in tensors)
            # A wait that sleeps leaves the core to others; that it ends late costs nothing while more is queued.
            self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> list[npt.NDArray[Any]]:
        """Wait for the copies."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [tensor.numpy() for tensor in self._tensors]


def _pinned_copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
