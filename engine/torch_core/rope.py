"""Rotary positions and the ways in which checkpoints stretch them to longer contexts.

Engine process; pure. A pair of dimensions of each head turns by ``inv_freq`` radians per position (RoPE, Su et al.
2021). Scalings: "linear" (position interpolation, Chen et al. 2023), "llama3", "yarn" (Peng et al. 2023) and "dynamic",
which within the trained context changes nothing; the engine stays within it, since a frequency that depends on the
length would not fit the keys that are cached already.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokservice.wire.errors import StartupError

Frequencies = npt.NDArray[np.float32]  # (head_dim / 2,) radians per position

SCALINGS = ("default", "linear", "llama3", "yarn", "dynamic")


class Rope(NamedTuple):
    """What a config.json says about positions."""

    inv_freq: Frequencies
    scale: float  # of rotated queries and keys
    max_position: int  # longest sequence


def read_rope(config: dict[str, Any], head_dim: int) -> Rope:
    """Frequencies with their scaling. Raises StartupError where it is not supported, KeyError for a missing key."""
    # transformers 5 writes rope_parameters; before, there were rope_theta and rope_scaling.
    rope = {"rope_theta": config.get("rope_theta", 10000.0)}
    rope |= config.get("rope_scaling") or {}
    rope |= config.get("rope_parameters") or {}
    max_position = int(config["max_position_embeddings"])
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in SCALINGS:
        raise StartupError(f"unsupported rope scaling {kind}; this engine has {', '.join(SCALINGS)}")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1):
        raise StartupError("unsupported partial_rotary_factor: this engine rotates whole heads")
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq: Frequencies = (1.0 / np.power(np.float32(rope["rope_theta"]), exponents)).astype(np.float32)
    if kind == "linear":
        return Rope(inv_freq / np.float32(rope["factor"]), 1.0, max_position)
    trained = rope.get("original_max_position_embeddings") or max_position
    if kind == "llama3":
        return Rope(_llama3(inv_freq, rope, trained), 1.0, max_position)
    if kind == "yarn":
        factor = rope.get("factor") or max_position / trained
        longest = max(max_position, int(factor * trained))
        return Rope(_yarn(inv_freq, rope, factor, trained), _yarn_scale(rope, factor), longest)
    return Rope(inv_freq, 1.0, trained if kind == "dynamic" else max_position)


def _llama3(inv_freq: Frequencies, rope: dict[str, Any], trained: int) -> Frequencies:
    """Long wavelengths are stretched by ``factor``, short ones stay, those between are blended (Llama 3.1)."""
    turns = trained * inv_freq / np.float32(2 * math.pi)  # over the trained context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return _blend(inv_freq, rope["factor"], keep)


def _yarn(inv_freq: Frequencies, rope: dict[str, Any], factor: float, trained: int) -> Frequencies:
    """As llama3, but the blend is linear in the dimension's number (section 3.2 of the paper).

    Dimension pairs with ``beta_fast`` turns over the trained context and more stay, those with ``beta_slow`` and fewer
    are stretched by the factor.
    """
    num_pairs = len(inv_freq)

    def pair_with(turns: float) -> float:
        """The pair, as a real number, that turns so often: the inverse of trained / (2 pi base ** (2 pair / dim))."""
        return num_pairs * math.log(trained / (2 * math.pi * turns)) / math.log(rope["rope_theta"])

    first, last = pair_with(rope.get("beta_fast") or 32), pair_with(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    ramp = (np.arange(num_pairs) - first) / (last - first if last != first else 0.001)
    return _blend(inv_freq, factor, 1 - np.clip(ramp, 0.0, 1.0))


def _yarn_scale(rope: dict[str, Any], factor: float) -> float:
    """Sharper attention over a longer context (section 3.4); DeepSeek states it by two numbers."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


def _blend(inv_freq: Frequencies, factor: float, keep: npt.NDArray[Any]) -> Frequencies:
    """Frequencies divided by a factor where ``keep`` is 0, unchanged where it is 1."""
    blended: Frequencies = ((1 - keep) * inv_freq / factor + keep * inv_freq).astype(np.float32)
    return blended
