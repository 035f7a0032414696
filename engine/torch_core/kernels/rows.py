"""Kernels for a layer's rows, but for attention.

Engine process, CPU. A kernel computes one task; the tasks of a call are shared out among threads, see ``calls.py``.
Sizes and addresses come as integers; docstrings state the shapes of the arrays: float32, and int64 where they say so.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.torch_core.kernels.language import (
    DTYPES,
    Address,
    Array,
    Float,
    compiled,
    double_of_bits,
    float_of_bits,
    floats,
    greater,
    ints,
)


@compiled
def exp(x: Float) -> Float:
    """e to the x, float32, to 2e-7 of itself, and never infinite; a call of the C library would not be vectorized."""
    return exp_between(min(max(x, np.float32(-87.0)), np.float32(88.0)))


@compiled
def exp_between(x: Float) -> Float:
    """``exp``, for an x from -87 to 88."""
    power = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    x = x - power * np.float32(0.693359375) + power * np.float32(2.12194440e-4)  # ln 2 in two parts (Cody and Waite)
    series = np.float32(1 / 5040)
    series = series * x + np.float32(1 / 720)
    series = series * x + np.float32(1 / 120)
    series = series * x + np.float32(1 / 24)
    series = series * x + np.float32(1 / 6)
    series = series * x + np.float32(1 / 2)
    series = series * x + np.float32(1.0)
    series = series * x + np.float32(1.0)
    return series * float_of_bits((np.int32(power) + np.int32(127)) << np.int32(23))


@compiled
def greatest(x: Array, least: Float) -> Float:
    """Of x and ``least``."""
    for i in range(len(x)):
        least = greater(least, x[i])
    return least


@compiled
def inverse_rms(x: Array, eps_bits: int) -> Float:
    """1 / sqrt(mean(x^2) + eps)."""
    total = np.float32(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    return np.float32(1 / np.sqrt(total / len(x) + double_of_bits(eps_bits)))


@compiled
def silu(x: Float) -> Float:
    """x times its logistic function."""
    return x / (np.float32(1) + exp(-x))


def norm_kernel(dtype: str) -> Callable[..., None]:
    """For an output of float32 or bfloat16."""
    cells, width, save = DTYPES[dtype]

    @compiled
    def add_norm(
        task: int, slot: int, size: int, eps_bits: int, x: Address, delta: Address, weight: Address, output: Address
    ) -> None:
        """x (num_rows, size) += delta, unless its address is 0; output = x over its root mean square, times weight.

        A task is a row.
        """
        row = floats(x + task * size * 4, (size,))
        if delta != 0:
            change = floats(delta + task * size * 4, (size,))
            for i in range(size):
                row[i] += change[i]
        scale = inverse_rms(row, eps_bits)
        weights = floats(weight, (size,))
        normed = cells(output + task * size * width, (size,))
        for i in range(size):
            normed[i] = save(row[i] * scale * weights[i])

    kernel: Callable[..., None] = add_norm
    return kernel


@compiled
def rotate(
    task: int,
    slot: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    positions: Address,
    rotations: Address,
    eps_bits: int,
    q_norm: Address,
    k_norm: Address,
    qkv: Address,
) -> None:
    """Rotate queries and keys in place: qkv (num_rows, num_heads + 2 num_kv_heads, head_dim); a task is a row.

    positions (num_rows,) int64; rotations (max_len, head_dim / 2, 2), cosine and sine for each pair of neighbours.
    q_norm, k_norm (head_dim,): where their addresses are not 0, each head is normed and weighted before.
    """
    position = ints(positions, (task + 1,))[task]
    turns = floats(rotations + position * head_dim * 4, (head_dim,))
    row = qkv + task * (num_heads + 2 * num_kv_heads) * head_dim * 4
    for head in range(num_heads + num_kv_heads):
        x = floats(row + head * head_dim * 4, (head_dim,))
        norm = q_norm if head < num_heads else k_norm
        if norm != 0:
            weights = floats(norm, (head_dim,))
            scale = inverse_rms(x, eps_bits)
            for i in range(head_dim):
                x[i] *= scale * weights[i]
        for i in range(0, head_dim, 2):
            first, second = x[i], x[i + 1]
            x[i] = first * turns[i] - second * turns[i + 1]
            x[i + 1] = first * turns[i + 1] + second * turns[i]
