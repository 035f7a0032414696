"""Linear layers by kernels of our own: beside float64, and bitwise the same in any batch and by any threads."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from engine.torch_core.kernels.layout import TILE_DEPTH
from engine.torch_core.packed_linear import LAYOUTS, PackedGate, PackedLinear
from tests.helpers.kernel_checks import BAD, SEEDS, assert_near, at_an_end, random, rounded_to_int8, threads
from tests.helpers.loaded_kernels import kernels, require_tiles

NUM_ROWS = st.integers(0, 100) | st.sampled_from([1, 15, 16, 17, 31, 32, 33, 48, 64, 65, 96])
IN_FEATURES = st.integers(1, 200) | st.sampled_from([31, 32, 33, 64, 256])
OUT_FEATURES = st.integers(1, 100) | st.sampled_from([15, 16, 17, 31, 32, 33, 64])
ROW_BLOCKS = st.sampled_from([1, 64 * 200 * 2, 2**20])  # bytes: blocks of the fewest rows, of some more, of all

HALF_ULPS = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}  # of a number itself
MOST_ROWS = 32  # that are computed at once

some = settings(max_examples=300)
few = settings(max_examples=100)


@pytest.fixture(scope="module", params=list(LAYOUTS), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Of the weights."""
    if request.param is torch.bfloat16:
        require_tiles()
    dtype: torch.dtype = request.param
    return dtype


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """As it is stored in this format."""
    return rounded_to_int8(weight) if dtype is torch.int8 else weight.to(dtype)


class Layers:
    """A linear layer and a gate of random weights, with their exact results and what float32 sums may be off."""

    def __init__(self, dtype: torch.dtype, in_features: int, out_features: int, has_bias: bool, seed: int) -> None:
        normal = random(seed)
        self.dtype, self.input_dtype = dtype, LAYOUTS[dtype].input_dtype
        self.gate_weight, self.up_weight = normal(out_features, in_features), normal(out_features, in_features)
        self.biases = (normal(out_features), normal(out_features)) if has_bias else None
        self.pack()

    def pack(self, row_block_bytes: int = 2**20) -> None:
        """For the number of threads there is now."""
        loaded = kernels()
        with pytest.MonkeyPatch.context() as monkeypatch:
            layout = replace(LAYOUTS[self.dtype], row_block_bytes=row_block_bytes)
            monkeypatch.setitem(LAYOUTS, self.dtype, layout)
            self.linear = PackedLinear(self.gate_weight, self.biases and self.biases[0], loaded, self.dtype)
            self.gate = PackedGate(self.gate_weight, self.up_weight, self.biases, loaded, self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Both results side by side, float32."""
        return torch.cat([self.linear(x), self.gate(x)], dim=1)

    def rounded(self, x: Tensor) -> Tensor:
        """As the kernel reads inputs, float64."""
        return x.to(self.input_dtype).double()

    def exact(self, x: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Of the gate's weight, 0, or the up's, 1; the error is that of any order of the sum."""
        weight = rounded((self.gate_weight, self.up_weight)[number], self.dtype).double().T
        x = self.rounded(x)
        bias = self.biases[number].double() if self.biases else torch.zeros(weight.size(1)).double()
        magnitudes = x.abs() @ weight.abs() + bias.abs()
        return x @ weight + bias, (len(weight) + 1) * 2.0**-24 * magnitudes


shapes = given(
    num_rows=NUM_ROWS,
    in_features=IN_FEATURES,
    out_features=OUT_FEATURES,
    has_bias=st.booleans(),
    row_block_bytes=ROW_BLOCKS,
    seed=SEEDS,
)


@some
@shapes
def test_linear(
    dtype: torch.dtype,
    num_rows: int,
    in_features: int,
    out_features: int,
    has_bias: bool,
    row_block_bytes: int,
    seed: int,
) -> None:
    layers = Layers(dtype, in_features, out_features, has_bias, seed)
    layers.pack(row_block_bytes)
    x = random(seed + 1)(num_rows, in_features)
    before = x.clone()
    output = layers.linear(x)
    exact, error = layers.exact(x, 0)
    assert output.is_contiguous()
    assert_near(output, exact, 0, error)
    assert torch.equal(x, before)
    assert torch.equal(layers.linear(x.to(layers.input_dtype)), output)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@few
@shapes
def test_gate(
    dtype: torch.dtype,
    num_rows: int,
    in_features: int,
    out_features: int,
    has_bias: bool,
    row_block_bytes: int,
    seed: int,
    scale: float,
) -> None:
    """Rounded once, if at all; of sums so great that their exponentials are not finite in float32, too."""
    layers = Layers(dtype, in_features, out_features, has_bias, seed)
    layers.pack(row_block_bytes)
    x = random(seed + 1)(num_rows, in_features) * scale
    output = layers.gate(x)
    (gates, gate_error), (ups, up_error) = (layers.exact(x, number) for number in (0, 1))
    exact = F.silu(gates) * ups
    slope = 1.1  # the greatest of silu
    error = slope * gate_error * (ups.abs() + up_error) + F.silu(gates).abs() * up_error + 1e-6 * exact.abs() + 1e-29
    assert output.is_contiguous()
    assert_near(output, exact, HALF_ULPS[layers.input_dtype], 1.01 * error, layers.input_dtype)


def test_sums_are_not_rounded_before_the_end(dtype: torch.dtype) -> None:
    """A float32 keeps 1 beside 2^15, which the halves do not; and a bias is float32."""
    weight = torch.tensor([[127.0, 127.0, -127.0], [0.0, 127.0, 0.0]])
    linear = PackedLinear(weight, torch.tensor([0, 2.0**-16]), kernels(), dtype)
    assert linear(torch.tensor([[2.0**15, 1.0, 2.0**15]])).tolist() == [[127, 127 + 2.0**-16]]


@few
@given(num_rows=NUM_ROWS, in_features=IN_FEATURES, out_features=OUT_FEATURES, has_bias=st.booleans(), seed=SEEDS)
def test_int8_is_bitwise_float32_of_the_rounded_weights(
    num_rows: int, in_features: int, out_features: int, has_bias: bool, seed: int
) -> None:
    """Whether few rows or many: they are computed in two ways."""
    layers, exact = (Layers(dtype, in_features, out_features, has_bias, seed) for dtype in (torch.int8, torch.float32))
    exact.gate_weight, exact.up_weight = (rounded_to_int8(weight) for weight in (exact.gate_weight, exact.up_weight))
    exact.pack()
    x = random(seed + 1)(num_rows, in_features)
    assert torch.equal(layers(x), exact(x))


@few
@given(in_features=IN_FEATURES, out_features=OUT_FEATURES, power=st.sampled_from([-100, -40, 0, 100]), seed=SEEDS)
def test_int8_rounds_a_weight_by_half_a_step_of_its_group(
    in_features: int, out_features: int, power: int, seed: int
) -> None:
    """Whatever the size of the group's weights; where all of them are 0, they stay so."""
    weight = random(seed)(out_features, in_features) * 2.0**power
    weight[0] = 0
    weight[-1, :32] *= 1000
    stored = PackedLinear(weight, None, kernels(), torch.int8)(torch.eye(in_features)).T
    for group, rounded_group in zip(weight.split(32, dim=1), stored.split(32, dim=1), strict=True):
        steps = group.abs().amax(dim=1, keepdim=True) / 127
        assert ((group - rounded_group).abs() <= 0.51 * steps).all()


@few
@given(
    num_rows=NUM_ROWS.filter(bool),
    in_features=IN_FEATURES,
    out_features=OUT_FEATURES,
    row_block_bytes=ROW_BLOCKS,
    seed=SEEDS,
)
def test_a_row_is_bitwise_the_same_in_any_batch_by_any_threads(
    dtype: torch.dtype, num_rows: int, in_features: int, out_features: int, row_block_bytes: int, seed: int
) -> None:
    layers = Layers(dtype, in_features, out_features, True, seed)
    x = random(seed + 1)(num_rows, in_features)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(num_rows))
    with threads(1):
        layers.pack()
        expected = torch.cat([layers(row[None]) for row in x])
    for count in (1, 2, 3):
        with threads(count):
            layers.pack(row_block_bytes)
            assert torch.equal(layers(x), expected)
            assert torch.equal(layers(x[order]), expected[order])
            assert torch.equal(layers(x[num_rows // 3 :]), expected[num_rows // 3 :])


@few
@given(num_rows=NUM_ROWS.filter(bool), in_features=IN_FEATURES, out_features=OUT_FEATURES, bad=BAD, seed=SEEDS)
def test_what_is_not_a_number_stays_in_its_row(
    dtype: torch.dtype, num_rows: int, in_features: int, out_features: int, bad: float, seed: int
) -> None:
    """And is in all of that row's results."""
    layers = Layers(dtype, in_features, out_features, True, seed)
    generator = np.random.default_rng(seed)
    x = random(seed + 1)(num_rows, in_features)
    row, column = int(generator.integers(num_rows)), int(generator.integers(in_features))
    expected = layers(x)
    x[row, column] = bad
    output = layers(x)
    assert not output[row].isfinite().any()
    if np.isnan(bad):
        assert output[row].isnan().all()
    others = torch.arange(num_rows) != row
    assert torch.equal(output[others], expected[others])


def compute(layer: PackedLinear | PackedGate, x: Tensor, output: Tensor) -> None:
    """Into memory of the test, with padded columns; x has the kernel's dtype and is not copied."""
    layer._product(x, output)


def empty_output(layer: PackedLinear | PackedGate, num_rows: int) -> Tensor:
    product, is_gate = layer._product, isinstance(layer, PackedGate)
    num_columns = product.num_columns // 2 if is_gate else product.num_columns
    return torch.empty(num_rows, num_columns, dtype=product.input_dtype if is_gate else torch.float32)


@few
@given(num_rows=NUM_ROWS, depth=st.integers(1, 4), out_features=OUT_FEATURES, row_block_bytes=ROW_BLOCKS, seed=SEEDS)
def test_rows_before_and_behind_are_neither_read_nor_written(
    dtype: torch.dtype, num_rows: int, depth: int, out_features: int, row_block_bytes: int, seed: int
) -> None:
    layers = Layers(dtype, TILE_DEPTH * depth, out_features, True, seed)
    layers.pack(row_block_bytes)
    x = random(seed + 1)(num_rows, TILE_DEPTH * depth).to(layers.input_dtype)
    ours = slice(MOST_ROWS, MOST_ROWS + num_rows)
    for layer in (layers.linear, layers.gate):
        inputs = torch.full((num_rows + 2 * MOST_ROWS, x.size(1)), torch.nan, dtype=x.dtype)
        inputs[ours] = x
        outputs = empty_output(layer, len(inputs)).fill_(7)
        compute(layer, inputs[ours], outputs[ours])
        assert torch.equal(outputs[ours, :out_features], layer(x))
        assert (outputs[: ours.start] == 7).all()
        assert (outputs[ours.stop :] == 7).all()


def test_no_byte_behind_weights_and_rows_is_touched(dtype: torch.dtype) -> None:
    """The process would die; what is fetched ahead does no harm."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(compute_at_ends_of_memory, dtype).result(timeout=100)


def compute_at_ends_of_memory(dtype: torch.dtype) -> None:
    for num_rows in (1, 15, 16, 17, 31, 32, 33, 50):
        for in_features, out_features in ((32, 16), (96, 100)):
            layers = Layers(dtype, in_features, out_features, True, num_rows)
            x = random(num_rows)(num_rows, in_features).to(layers.input_dtype)
            for layer in (layers.linear, layers.gate):
                expected, product = layer(x), layer._product
                product._weight, product._bias = at_an_end(product._weight), at_an_end(product._bias)
                product._addresses = (product._weight.data_ptr(), product._bias.data_ptr())
                output = at_an_end(empty_output(layer, num_rows))
                compute(layer, at_an_end(x), output)
                assert torch.equal(output[:, :out_features], expected)
