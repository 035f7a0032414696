"""What distinguishes one decoder-only model from another, read from its config.json.

Engine process; pure. The files in ``families`` map a Hugging Face architecture to a ``ModelSpec``;
``model.py`` computes any of them.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.torch_core import families
from tokservice.wire.errors import StartupError

Frequencies = npt.NDArray[np.float32]  # (head_dim / 2,) radians per position


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
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise StartupError(f"unsupported hidden_act {config['hidden_act']}: only silu")
    return spec


def common_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The fields that all families spell alike."""
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "intermediate_size": config["intermediate_size"],
        "max_position": config["max_position_embeddings"],
        "rms_eps": config["rms_norm_eps"],
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "inv_freq": inverse_frequencies(config, head_dim),
    }


def inverse_frequencies(config: dict[str, Any], head_dim: int) -> Frequencies:
    """Rotary frequencies with their scaling, of type "default", "linear" or "llama3". Raises StartupError."""
    # transformers 5 writes rope_parameters; before, there were rope_theta and rope_scaling.
    rope = {"rope_theta": config.get("rope_theta", 10000.0)}
    rope |= config.get("rope_scaling") or {}
    rope |= config.get("rope_parameters") or {}
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq: Frequencies = (1.0 / np.power(np.float32(rope["rope_theta"]), exponents)).astype(np.float32)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "linear":
        return inv_freq / np.float32(rope["factor"])
    if kind == "llama3":
        return _llama3_frequencies(inv_freq, rope)
    if kind != "default":
        raise StartupError(f"unsupported rope scaling {kind}; this engine has default, linear and llama3")
    return inv_freq


def _llama3_frequencies(inv_freq: Frequencies, rope: dict[str, Any]) -> Frequencies:
    """Long wavelengths are stretched by ``factor``, short ones stay, those between are blended (Llama 3.1)."""
    turns = rope["original_max_position_embeddings"] * inv_freq / np.float32(2 * math.pi)  # over the trained context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    scaled: Frequencies = ((1 - keep) * inv_freq / rope["factor"] + keep * inv_freq).astype(np.float32)
    return scaled
