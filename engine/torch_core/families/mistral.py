"""Mistral. Version 0.1 attends to a sliding window; up to the window's length that is full attention, so the
context is cut there."""

from __future__ import annotations

from typing import Any

from engine.torch_core.model_spec import ModelSpec, common_fields

ARCHITECTURE = "MistralForCausalLM"


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec in a config.json."""
    fields = common_fields(config)
    fields["max_position"] = min(fields["max_position"], config.get("sliding_window", 4096) or fields["max_position"])
    return ModelSpec(**fields)
