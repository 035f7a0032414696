"""Reads tensors from the safetensors files of a model folder, sharded or not.

Engine process. Files are memory-mapped: a tensor costs memory only while it is in use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model_files import read_json
from tokservice.wire.errors import StartupError

FORMATS = (torch.float32, torch.bfloat16, torch.float16)


class Checkpoint:
    """All tensors of a model folder, by name. Raises StartupError where files or tensors are missing, or quantized."""

    def __init__(self, model_dir: Path) -> None:
        index = read_json(model_dir, "model.safetensors.index.json")
        try:
            names = sorted(set(index.get("weight_map", {}).values())) or ["model.safetensors"]
            paths = [model_dir / name for name in names]
        except (AttributeError, TypeError) as error:
            raise StartupError(f"model.safetensors.index.json has an unexpected form: {error}") from error
        self._model_dir = model_dir
        self._file_of: dict[str, Any] = {}
        for path in paths:
            if not path.is_file():
                raise StartupError(f"{model_dir} has no {path.name}: weights must be safetensors files")
            try:
                file: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise StartupError(f"cannot read {path}: {error}") from error
            self._file_of.update(dict.fromkeys(file.keys(), file))

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """As it is stored; ``shape`` is what config.json implies: ids and kernels would reach beyond another one."""
        if name not in self._file_of:
            raise StartupError(f"the weights in {self._model_dir} lack the tensor {name}")
        tensor: Tensor = self._file_of[name].get_tensor(name)
        if tensor.dtype not in FORMATS:  # without its scales it would be noise
            kind = str(tensor.dtype).removeprefix("torch.")
            raise StartupError(f"the tensor {name} is {kind}: this engine reads no quantized checkpoints")
        if tuple(tensor.shape) != shape:
            raise StartupError(f"the tensor {name} is {tuple(tensor.shape)}, by config.json it would be {shape}")
        return tensor
