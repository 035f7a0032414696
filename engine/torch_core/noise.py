"""Sampling noise as a pure function of (seed, choice, position).

Engine process; numpy alone. No generator has state, so a choice draws the same numbers alone or batched, preempted,
or continued by another engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_STEP = np.uint64(0x9E3779B97F4A7C15)


def noise_keys(seeds: Sequence[int], choices: Sequence[int]) -> npt.NDArray[np.uint64]:
    """One key for each (seed, choice)."""
    return _mix(np.array(seeds, np.uint64) ^ _mix(np.array(choices, np.uint64)))


def uniforms(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A uniform number in [0, 1), a multiple of 2**-40, for each (key, output position)."""
    return (_mix(keys + positions.astype(np.uint64) * _STEP) >> np.uint64(24)).astype(np.float64) * 2.0**-40


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea, Flood 2014): a counter-based generator; arrays wrap around silently."""
    values = values + _STEP
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
