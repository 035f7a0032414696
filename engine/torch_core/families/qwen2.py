"""Qwen2 and Qwen2.5: biases on q, k and v."""

from __future__ import annotations

from typing import Any

from engine.torch_core.model_spec import ModelSpec, common_fields

ARCHITECTURE = "Qwen2ForCausalLM"


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec in a config.json; a sliding window, where one is in use, cuts the context."""
    fields = common_fields(config)
    if config.get("use_sliding_window"):
        fields["max_position"] = min(fields["max_position"], config["sliding_window"])
    return ModelSpec(**fields, qkv_bias=True)
