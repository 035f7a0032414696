"""The compiled kernels of a layer's rows: beside torch in float64, bitwise the same in any batch and by any threads."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.torch_core.kernels import calls, language, rows
from engine.torch_core.kernels.layout import PANEL
from engine.torch_core.linear import pack_linear
from engine.torch_core.model_spec import ModelSpec, read_spec
from engine.torch_core.packed_linear import PackedLinear
from engine.torch_core.row_ops import SHARE_ROWS_FROM, CompiledRowOps, TorchRowOps
from tests.helpers.kernel_checks import BAD, SEEDS, assert_near, random, threads
from tests.helpers.loaded_kernels import kernels, require_tiles

MAX_LEN = 70
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 9,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "head_dim": 8,
    "intermediate_size": 8,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
}

SIZES = st.integers(1, 200)
EPS = st.sampled_from([1e-12, 1e-6, 1e-5, 1e-2])
SCALES = st.sampled_from([1e-4, 1.0, 1e4])
WEIGHT_DTYPES = st.sampled_from([torch.float16, torch.float32, torch.int8])
NUM_ROWS = st.integers(1, 9) | st.sampled_from([SHARE_ROWS_FROM - 1, SHARE_ROWS_FROM, 3 * SHARE_ROWS_FROM + 1])
HEADS = st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from([2, 6, 16, 64]))  # KV, query of each, head_dim

DELTA_DTYPES = st.sampled_from([None, torch.float32, torch.bfloat16])
HALVES = st.integers(12, 100)

some = settings(max_examples=100, deadline=None)


def spec_of(num_kv_heads: int = 1, group: int = 1, head_dim: int = 8, eps: float = 1e-5) -> ModelSpec:
    heads = {"num_attention_heads": num_kv_heads * group, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}
    return read_spec({**CONFIG, **heads, "rms_norm_eps": eps})


def both(spec: ModelSpec) -> tuple[CompiledRowOps, TorchRowOps]:
    return CompiledRowOps(spec, MAX_LEN, kernels()), TorchRowOps(spec, MAX_LEN, torch.device("cpu"))


@some
@given(num_rows=NUM_ROWS, size=SIZES, eps=EPS, scale=SCALES, delta_dtype=DELTA_DTYPES, seed=SEEDS)
def test_norm(num_rows: int, size: int, eps: float, scale: float, delta_dtype: torch.dtype | None, seed: int) -> None:
    """x takes the delta on, whose sum is exact but for its rounding; then it is divided by its root mean square."""
    compiled, by_torch = both(spec_of(eps=eps))
    normal = random(seed)
    x = normal(num_rows, size) * scale
    delta = None if delta_dtype is None else (normal(num_rows, size) * scale).to(delta_dtype)
    sums = x.clone() if delta is None else x + delta.float()
    weight = normal(size)
    output = compiled.norm(x, weight, delta)
    assert torch.equal(x, sums)
    assert_near(output, by_torch.norm(sums.double(), weight.double()), 1e-6)


def test_norm_of_zeros_is_zero() -> None:
    compiled, _ = both(spec_of())
    assert torch.equal(compiled.norm(torch.zeros(3, 7), torch.ones(7)), torch.zeros(3, 7))


# float32: NaNs, among them signalling ones and such as a carry would make 0, infinities, denormals
ODD_BITS = st.sampled_from([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, 0x7F800000, -(2**23), 1, 0x7FFFFF])


@some
@given(
    shape=st.tuples(NUM_ROWS, SIZES),
    eps=EPS,
    scale=SCALES,
    has_delta=st.booleans(),
    bits=st.none() | ODD_BITS,
    seed=SEEDS,
)
def test_norm_in_bfloat16(
    shape: tuple[int, int], eps: float, scale: float, has_delta: bool, bits: int | None, seed: int
) -> None:
    """As torch rounds what comes out in float32, which x stays; what is not a number is so after it."""
    require_tiles()  # whose kernels read it
    in_float32, in_bfloat16 = (
        CompiledRowOps(spec_of(eps=eps), MAX_LEN, kernels(), dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    normal = random(seed)
    x, delta, weight = normal(*shape) * scale, normal(*shape) if has_delta else None, normal(shape[1])
    if bits is not None:
        x[-1, seed % shape[1]] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    rounded = x.clone()
    expected = in_float32.norm(x, weight, delta).bfloat16()
    output = in_bfloat16.norm(rounded, weight, delta)
    assert output.dtype is torch.bfloat16
    assert output[:-1].isfinite().all()
    for one, other in ((output, expected), (rounded, x)):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_bfloat16_is_the_nearest() -> None:
    """To the even one between two; infinite beyond the greatest; a NaN of any bits is one, which a carry would undo."""
    round_one: Any = language.bfloat_of_float
    upper = np.arange(2**16, dtype=np.uint32)[:, None] << np.uint32(16)
    bits = (upper + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)).flatten()
    x = bits.view(np.float32)
    results = torch.from_numpy(np.array([round_one(value) for value in x], dtype=np.uint16)).view(torch.bfloat16)
    expected = torch.from_numpy(x).bfloat16()
    is_nan = torch.from_numpy(np.isnan(x))
    assert torch.equal(results.isnan(), is_nan)
    assert torch.equal(results[~is_nan].view(torch.int16), expected[~is_nan].view(torch.int16))


@some
@given(num_rows=NUM_ROWS, heads=HEADS, eps=EPS, scale=SCALES, has_norms=st.booleans(), seed=SEEDS)
def test_rotate(
    num_rows: int, heads: tuple[int, int, int], eps: float, scale: float, has_norms: bool, seed: int
) -> None:
    """Queries and keys turn with their row's position, anywhere in the table; values stay as they are."""
    num_kv_heads, group, head_dim = heads
    spec = replace(spec_of(num_kv_heads, group, head_dim, eps), rope_scale=1.25)
    compiled, by_torch = both(spec)
    normal, num_rotated = random(seed), spec.num_heads + num_kv_heads
    qkv = normal(num_rows, num_rotated + num_kv_heads, head_dim) * scale
    q_norm, k_norm = (normal(head_dim), normal(head_dim)) if has_norms else (None, None)
    positions = torch.from_numpy(np.random.default_rng(seed).choice([0, 1, 17, MAX_LEN - 1], num_rows))
    before, expected = qkv.clone(), qkv.double()
    for ops, x in ((compiled, qkv), (by_torch, expected)):
        ops.begin(positions)
        ops.rotate(x, *(None if norm is None else norm.to(x.dtype) for norm in (q_norm, k_norm)))
    # torch turns in float32 too; a sum of two products can be small beside them
    greatest = expected[:, :num_rotated].abs().amax(-1, keepdim=True)
    assert_near(qkv[:, :num_rotated], expected[:, :num_rotated], 0, 1e-6 * greatest)
    assert torch.equal(qkv[:, num_rotated:], before[:, num_rotated:])


def test_exponential() -> None:
    """To 2e-7 of itself wherever float32 has it, and never infinite."""
    exp: Any = rows.exp
    steps = np.linspace(-87, 88, 20_001, dtype=np.float32)
    halves = np.arange(-125, 126, dtype=np.float32) * np.float32(math.log(2) / 2)  # where the power of 2 changes
    edges = [np.nextafter(halves, np.float32(limit), dtype=np.float32) for limit in (-np.inf, np.inf)]
    x = np.concatenate([steps, halves, *edges, np.array([-1e-30, 0, 1e-30], np.float32)])
    exact = np.exp(x.astype(np.float64))
    results = np.array([exp(value) for value in x])
    assert np.array_equal(results.astype(np.float32), results)
    assert (np.abs(results - exact) <= 2e-7 * exact).all()
    for value in (-88, -104, -1e4, -3e38, -np.inf):
        assert 0 <= exp(np.float32(value)) < 2e-38
    for value in (89, 1e4, 3e38, np.inf):
        assert 1e38 < exp(np.float32(value)) < np.inf


Outputs = dict[str, Tensor]


def outputs(x: Tensor, ops: CompiledRowOps, linear: PackedLinear) -> Outputs:
    """Of each kernel, of the same rows (num_rows, 2 * half); rotated is what they begin with, three heads of 8."""
    rotated = x[:, :24].reshape(-1, 3, 8).clone()
    ops.begin(torch.full((len(x),), MAX_LEN - 1))
    ops.rotate(rotated, None, None)
    norm = ops.norm(x.clone(), torch.linspace(0.5, 2, x.size(1)))
    return {"norm": norm, "rotate": rotated, "linear": linear(x)}


@settings(max_examples=50, deadline=None)
@given(num_rows=NUM_ROWS, half=HALVES, out_features=SIZES, dtype=WEIGHT_DTYPES, seed=SEEDS)
def test_a_row_is_bitwise_the_same_in_any_batch_by_any_threads(
    num_rows: int, half: int, out_features: int, dtype: torch.dtype, seed: int
) -> None:
    """What the engine's deterministic mode, and a request that another engine continues, rely on."""
    normal = random(seed)
    x, weight = normal(num_rows, 2 * half), normal(out_features, 2 * half)
    results = []
    for count in (1, 2):
        with threads(count):
            loaded = kernels()
            ops, linear = CompiledRowOps(spec_of(), MAX_LEN, loaded), PackedLinear(weight, None, loaded, dtype)
            results.append(outputs(x, ops, linear))
            alone = [outputs(row[None], ops, linear) for row in x]
            results.append({name: torch.cat([output[name] for output in alone]) for name in alone[0]})
    first = results[0]
    for result in results[1:]:
        for name, output in result.items():
            assert torch.equal(output, first[name]), name


@pytest.mark.parametrize(("out_features", "in_features"), [(576, 1536), (960, 576)])
def test_a_row_of_a_real_size_is_bitwise_the_same_in_any_batch(out_features: int, in_features: int) -> None:
    """oneDNN summed a single row of the first size in another order, and a restarted request went on otherwise."""
    normal = random(0)
    linear = pack_linear(normal(out_features, in_features), None, "float32", kernels())
    x = normal(130, in_features)
    alone = torch.cat([linear(row[None]) for row in x])
    for num_rows in (2, 5, 64, 130):
        assert torch.equal(linear(x[:num_rows]), alone[:num_rows])


@settings(max_examples=50, deadline=None)
@given(num_rows=st.integers(2, 9), half=HALVES, out_features=SIZES, bad=BAD, seed=SEEDS)
def test_what_is_not_a_number_stays_in_its_row(
    num_rows: int, half: int, out_features: int, bad: float, seed: int
) -> None:
    """It must reach the logits of its request, where it is found, and those of no other."""
    normal, generator = random(seed), np.random.default_rng(seed)
    x, weight = normal(num_rows, 2 * half), normal(out_features, 2 * half)
    ops, linear = CompiledRowOps(spec_of(), MAX_LEN, kernels()), PackedLinear(weight, None, kernels(), torch.float16)
    good = outputs(x, ops, linear)
    row, column = int(generator.integers(num_rows)), int(generator.integers(2 * half))
    x[row, column] = bad
    output = outputs(x, ops, linear)
    others = [index for index in range(num_rows) if index != row]
    for name in ("norm", "linear"):
        assert torch.equal(output[name][others], good[name][others]), name
    assert not output["linear"][row].isfinite().any()
    assert not output["norm"][row].isfinite().all()
    if math.isnan(bad):
        assert output["norm"][row].isnan().all()


@pytest.mark.skipif(sys.platform != "linux", reason="OpenMP libraries are looked for on Linux alone")
@pytest.mark.parametrize("count", [2, 3, 5])
def test_torchs_own_threads_compute(count: int) -> None:
    """Others would wait, spinning, on the cores of torch's. A call of few tasks must not end any of them."""
    running = Path("/proc/self/task")
    with threads(count):
        torch.zeros(2**20).add_(1)
        before = {thread.name for thread in running.iterdir()}
        loaded = kernels()
        assert loaded.num_threads == count
        CompiledRowOps(spec_of(), MAX_LEN, loaded).norm(torch.ones(100, 100), torch.ones(100))
        PackedLinear(torch.ones(2 * PANEL, 8), None, loaded, torch.float16)(torch.ones(1, 8))  # two tasks
        CompiledRowOps(spec_of(), MAX_LEN, loaded).norm(torch.ones(100, 100), torch.ones(100))
        assert {thread.name for thread in running.iterdir()} == before


def test_without_an_openmp_library_the_caller_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    normal = random(0)
    x, weight = normal(2 * SHARE_ROWS_FROM, 150), normal(150, 150)
    shared, _ = both(spec_of())
    with_threads = outputs(x, shared, PackedLinear(weight, None, kernels(), torch.float16))
    monkeypatch.setattr(calls, "_TORCH", tmp_path / "absent.so")
    assert kernels().num_threads == 1
    alone, _ = both(spec_of())
    for name, output in outputs(x, alone, PackedLinear(weight, None, kernels(), torch.float16)).items():
        assert torch.equal(output, with_threads[name]), name
