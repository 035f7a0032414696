"""Reads tensors from the safetensors files of a model folder, sharded or not.

Engine process. Files are memory-mapped: a tensor costs memory only while it is in use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model_files import read_json
from tokservice.wire.errors import StartupError


class Checkpoint:
    """All tensors of a model folder, by name. Raises StartupError where files or tensors are missing."""

    def __init__(self, model_dir: Path) -> None:
        shards = read_json(model_dir, "model.safetensors.index.json").get("weight_map", {}).values()
        names = sorted(set(shards)) or ["model.safetensors"]
        self._model_dir = model_dir
        self._file_of: dict[str, Any] = {}
        for name in names:
            if not (model_dir / name).is_file():
                raise StartupError(f"{model_dir} has no {name}: weights must be safetensors files")
            try:
                file: Any = safe_open(model_dir / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise StartupError(f"cannot read {model_dir / name}: {error}") from error
            self._file_of.update(dict.fromkeys(file.keys(), file))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> Tensor:
        """The tensor as it is stored."""
        if name not in self._file_of:
            raise StartupError(f"the weights in {self._model_dir} lack the tensor {name}")
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor
