"""Llama 2, 3, 3.1, 3.2 and models of the same shape (SmolLM2, TinyLlama)."""

from __future__ import annotations

from typing import Any

from engine.torch_core.model_spec import ModelSpec, common_fields

ARCHITECTURE = "LlamaForCausalLM"


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec in a config.json."""
    bias = config.get("attention_bias", False)
    return ModelSpec(**common_fields(config), qkv_bias=bias, o_bias=bias, mlp_bias=config.get("mlp_bias", False))
