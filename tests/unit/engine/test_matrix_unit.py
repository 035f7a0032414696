"""A CPU's matrix unit has users beside our kernels, in the same threads, and must be asked for by a process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.torch_core.attention import MAX_LOOKUP_TOKENS
from engine.torch_core.kernels.calls import Kernels
from engine.torch_core.kernels.machine_code import ARCH_PRCTL, TILE_DATA, MachineCode, load_kernels
from engine.torch_core.packed_linear import PackedGate, PackedLinear
from tests.helpers.cached_sequences import CachedSequences
from tests.helpers.kernel_checks import assert_near, random, threads
from tests.helpers.loaded_kernels import kernels, require_tiles

GRANTED_REGISTERS = 0x1022  # of arch_prctl(2)

NOT_IN_USE = bytes(64)
# The only palette there is; for each of eight registers, bytes in a row, and rows.
OF_OTHERS = bytes([1, *[0] * 15, *[32, 0] * 8, *[0] * 16, *range(1, 9), *[0] * 8])

Product = tuple[Callable[[], Tensor], Tensor, Tensor]  # with its exact result, and what float32 sums may be off


class Configuration:
    """How the unit's registers are shaped, in this thread."""

    def __init__(self) -> None:
        from engine.torch_core.kernels import language, tiles

        save, load = tiles.save_configuration, tiles.load_configuration
        self._bytes = np.zeros(tiles.CONFIGURATION, dtype=np.uint8)
        self._save: Any = language.compiled(lambda address: save(address))
        self._load: Any = language.compiled(lambda address: load(address))

    def get(self) -> bytes:
        self._save(self._bytes.ctypes.data)
        return self._bytes.tobytes()

    def set(self, content: bytes) -> None:
        self._bytes[:] = np.frombuffer(content, dtype=np.uint8)
        self._load(self._bytes.ctypes.data)


@pytest.fixture(autouse=True, scope="module")
def tiles() -> None:
    require_tiles()


def product_of(compute: Callable[[], Tensor], left: Tensor, right: Tensor) -> Product:
    left, right = left.bfloat16().double(), right.bfloat16().double()
    error = (left.size(-1) + 1) * 2.0**-24 * (left.abs() @ right.abs())
    return compute, left @ right, error


def ours(rng: np.random.Generator, loaded: Kernels) -> Product:
    num_rows, in_features, out_features = sizes(rng)
    normal = random(int(rng.integers(2**32)))
    x, weight = normal(num_rows, in_features), normal(out_features, in_features)
    linear = PackedLinear(weight, None, loaded, torch.bfloat16)
    return product_of(lambda: linear(x), x, weight.T)


def of_onednn(rng: np.random.Generator, _: Kernels) -> Product:
    num_rows, in_features, out_features = sizes(rng)
    normal = random(int(rng.integers(2**32)))
    kind = rng.choice(["linear", "mm", "bmm", "packed"])
    num_products = (3,) if kind == "bmm" else ()
    x, matrix = normal(*num_products, num_rows, in_features), normal(*num_products, in_features, out_features)
    left, right = x.bfloat16(), matrix.bfloat16()
    if kind == "packed":
        packed = torch.ops.mkldnn._reorder_linear_weight(right.T.contiguous(), 32)
        return product_of(lambda: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], ""), x, matrix)
    if kind == "linear":
        return product_of(lambda: F.linear(left, right.T.contiguous()), x, matrix)
    return product_of(lambda: torch.matmul(left, right), x, matrix)


def sizes(rng: np.random.Generator) -> list[int]:
    return [int(rng.choice([1, 3, 16, 17, 31, 32, 33, 48, 64, 100])), *rng.integers(1, 300, 2).tolist()]


def take_turns(seed: int, num_threads: int) -> None:
    """Products of both in any order; most shape the unit's registers in another way than the one before."""
    rng, loaded = np.random.default_rng(seed), kernels()
    assert loaded.num_threads == num_threads
    for _ in range(20):
        products = [make(rng, loaded) for make in (ours, of_onednn) for _ in range(3)]
        for index in rng.integers(len(products), size=20):
            compute, exact, error = products[index]
            result = compute()
            half_ulp = 2.0**-8 if result.dtype is torch.bfloat16 else 0
            assert_near(result, exact, half_ulp, 1.01 * error, result.dtype)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_products_of_onednn_in_between(num_threads: int) -> None:
    with threads(num_threads):
        take_turns(num_threads, num_threads)


def test_products_of_onednn_in_between_and_at_once() -> None:
    with threads(2), ThreadPoolExecutor(2) as pool:
        for turns in [pool.submit(take_turns, seed, 2) for seed in (3, 4)]:
            turns.result(timeout=60)


@pytest.fixture(scope="module")
def configuration() -> Iterator[Configuration]:
    """Of this thread, which is left as others expect it."""
    configuration = Configuration()
    yield configuration
    configuration.set(NOT_IN_USE)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 40])
@pytest.mark.parametrize("before", [NOT_IN_USE, OF_OTHERS], ids=["not in use", "of others"])
def test_the_configuration_is_what_it_was_before(configuration: Configuration, before: bytes, num_rows: int) -> None:
    """Other code in the thread may count on it; and registers in use are saved whenever the thread is switched."""
    x, weight = torch.ones(num_rows, 64), torch.ones(64, 64)
    with threads(1):
        loaded = kernels()
        sequences = CachedSequences((1, 2, 64, 32), [MAX_LOOKUP_TOKENS + num_rows], "bfloat16", 0)
    linear, gate = (
        PackedLinear(weight, None, loaded, torch.bfloat16),
        PackedGate(weight, weight, None, loaded, torch.bfloat16),
    )
    sequences.begin((0, 0, MAX_LOOKUP_TOKENS + num_rows))
    computations: list[Callable[[], object]] = [lambda: linear(x), lambda: gate(x), sequences.attend]
    for compute in computations:
        configuration.set(before)
        assert configuration.get() == before
        compute()
        assert configuration.get() == before


def test_threads_older_than_the_permission_have_it() -> None:
    """As torch's are, which begin with its first operation."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(compute_in_older_threads).result(timeout=100)


def compute_in_older_threads() -> None:
    torch.set_num_threads(2)
    torch.zeros(2**20).add_(1)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.zeros(2**20).add_, 1).result()
        assert not is_granted()
        code = load_kernels()
        assert code.has_tiles
        assert is_granted()
        assert torch.equal(pool.submit(product_of_ones, code).result(), torch.full((9, 256), 64.0))
        assert torch.equal(product_of_ones(code), torch.full((9, 256), 64.0))


def product_of_ones(code: MachineCode) -> Tensor:
    loaded = Kernels(code)
    assert loaded.num_threads == 2
    return PackedLinear(torch.ones(256, 64), None, loaded, torch.bfloat16)(torch.ones(9, 64))


def is_granted() -> bool:
    registers = ctypes.c_uint64()
    assert ctypes.CDLL(None).syscall(ARCH_PRCTL, GRANTED_REGISTERS, ctypes.byref(registers)) == 0
    return bool(registers.value >> TILE_DATA & 1)
