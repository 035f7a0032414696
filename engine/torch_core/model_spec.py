"""What distinguishes one decoder-only model from another, read from its config.json.

Engine process; pure. The files in ``families`` map a Hugging Face architecture to a ``ModelSpec``;
``model.py`` computes any of them.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.torch_core import families
from engine.torch_core.rope import Frequencies, read_rope
from tokservice.wire.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A pre-norm decoder with RMS norms, rotary positions, grouped-query attention and a gated SiLU MLP."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int  # longest sequence
    rms_eps: float
    tied_embeddings: bool
    inv_freq: Frequencies  # rotary
    rope_scale: float = 1.0  # of rotated queries and keys
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # an RMS norm over each head of q and k, before the rotation


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """The spec of the architecture that a config.json names. Raises StartupError where it is not supported."""
    known = {}
    for info in pkgutil.iter_modules(families.__path__):
        family = importlib.import_module(f"{families.__name__}.{info.name}")
        known[family.ARCHITECTURE] = family.read
    named = config.get("architectures") or ["(none named in config.json)"]
    if named[0] not in known:
        raise StartupError(
            f"unsupported architecture {named[0]}; this engine runs {', '.join(sorted(known))}: "
            "for other models put another engine behind the front end"
        )
    try:
        spec: ModelSpec = known[named[0]](config)
    except KeyError as error:
        raise StartupError(f"config.json of {named[0]} lacks the key {error}") from error
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise StartupError(f"config.json of {named[0]} has an unexpected form: {error}") from error
    if spec.num_layers < 1:
        raise StartupError(f"config.json of {named[0]} has no layers")
    if not np.isfinite(spec.inv_freq).all():
        raise StartupError(f"config.json of {named[0]}: rope_theta or a factor beside it is no number above 0")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise StartupError(f"unsupported hidden_act {config['hidden_act']}: only silu")
    return spec


def common_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The fields that all families spell alike."""
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    rope = read_rope(config, head_dim)
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "intermediate_size": config["intermediate_size"],
        "max_position": rope.max_position,
        "rms_eps": config["rms_norm_eps"],
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "inv_freq": rope.inv_freq,
        "rope_scale": rope.scale,
    }


def window_of_upper_layers(config: dict[str, Any]) -> int | None:
    """Tokens of the sliding window that Qwen's layers from ``max_window_layers`` on have, where it is in use."""
    has_windows = config.get("max_window_layers", 28) < config["num_hidden_layers"]
    if config.get("layer_types"):
        has_windows = "sliding_attention" in config["layer_types"]
    return config.get("sliding_window") if has_windows and config.get("use_sliding_window") else None
