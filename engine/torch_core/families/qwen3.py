"""Qwen3 (dense): an RMS norm on each head of q and k."""

from __future__ import annotations

from typing import Any

from engine.torch_core.model_spec import ModelSpec, common_fields, window_of_upper_layers

ARCHITECTURE = "Qwen3ForCausalLM"


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec in a config.json; a sliding window, where one is in use, cuts the context."""
    fields = common_fields(config)
    fields["max_position"] = min(fields["max_position"], window_of_upper_layers(config) or fields["max_position"])
    bias = config.get("attention_bias", False)
    return ModelSpec(**fields, qkv_bias=bias, o_bias=bias, qk_norm=True)
