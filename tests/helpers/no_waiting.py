"""Catches what makes the host wait for a GPU, without one: the code runs on the "meta" device, which has no values.

Reading a value there (``item``, ``tolist``, ``bool``, a mask as an index) fails by itself. What remains are copies
from pageable memory, for which the host waits until all that is queued is done; these modes refuse them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")


class WouldWait(AssertionError):
    """The host would wait for the device here."""


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raises WouldWait within, or NotImplementedError where a value is read."""
    with _NoHiddenCopies(), _NoBlockingCopies():
        yield


class OnTheDeviceAlone(TorchDispatchMode):
    """What a CUDA graph may record: a copy from the host would repeat the values, and the address, of that moment."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(isinstance(one, torch.Tensor) and one.device != DEVICE for one in (*args, result)):
            raise WouldWait(f"{function} is not on the device alone")
        return result


class _NoHiddenCopies(TorchFunctionMode):
    """Refuses tensors built on the device from Python values, and indexing by what is not there."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") not in (None, "cpu"):
            raise WouldWait("a tensor is built on the device from Python values")
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and args[0].device == DEVICE:
            for index in args[1] if isinstance(args[1], tuple) else (args[1],):
                if not isinstance(index, int | slice | None) and getattr(index, "device", None) != DEVICE:
                    raise WouldWait(f"an index of {type(index)} is copied to the device")
        return function(*args, **kwargs)


class _NoBlockingCopies(TorchDispatchMode):
    """Refuses copies between devices that are not asynchronous."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        tensors = [one for one in (*args, result) if isinstance(one, torch.Tensor) and one.dim()]
        if len({tensor.device for tensor in tensors}) > 1:
            name = function.overloadpacket.__name__
            if not (kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))):
                raise WouldWait(f"{name} between {[tensor.device for tensor in tensors]}")
        return result
