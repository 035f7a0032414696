"""The CPU's attention: its parts against plain formulas, and rows of a batch against the same rows alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.torch_core import prefill_attention
from engine.torch_core.prefill_attention import ATTEND, causal_mask
from tests.helpers.cached_sequences import CachedSequences, Piece, Shape
from tests.helpers.kernel_checks import assert_near

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def exact_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Row by row in float64; shapes as of ATTEND."""
    num_rows, num_heads, _ = query.shape
    start = key.shape[-1] - num_rows
    group = num_heads // len(key)
    rows = []
    for row in range(num_rows):
        seen = start + row + 1
        for head in range(num_heads):
            scores = query[row, head].double() @ key[head // group, :, :seen].double()
            rows.append(scores.softmax(0) @ value[head // group, :seen].double())
    return torch.stack(rows).view(num_rows, -1)


@pytest.mark.parametrize("dtype", ATTEND, ids=str)
@pytest.mark.parametrize(("num_rows", "start"), [(1, 0), (7, 0), (7, 1), (16, 33), (3, 64)])
@pytest.mark.parametrize("tile_scores", [1, 500, 2**21], ids=["one row", "a few rows", "all rows"])
def test_a_row_attends_to_all_before_and_none_after(
    dtype: torch.dtype, num_rows: int, start: int, tile_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile's mask and its slice of the context must agree at every edge: one token too many would leak the future."""
    monkeypatch.setattr(prefill_attention, "TILE_SCORES", tile_scores)
    torch.manual_seed(num_rows + start)
    context = start + num_rows
    query = torch.randn(num_rows, 6, 8)
    key, value = torch.randn(2, 8, context).to(dtype), torch.randn(2, context, 8).to(dtype)
    output = ATTEND[dtype](query, key, value, causal_mask(num_rows, start, dtype))
    assert output.dtype is torch.float32
    exact = exact_attention(query, key, value)
    assert (output - exact).abs().max() / exact.abs().max() < TOLERANCE[dtype]


SHAPES = st.tuples(
    st.integers(1, 3), st.integers(1, 4), st.sampled_from([2, 6, 16, 64]), st.sampled_from([1, 2, 8, 64])
)


class Contexts(CachedSequences):
    """All but the last tokens are in the cache; the last ones decode."""

    def __init__(self, shape: Shape, lens: list[int], weight_format: str, seed: int) -> None:
        super().__init__(shape, lens, weight_format, seed)
        for index, length in enumerate(lens):
            if length > 1:
                self.compute((index, 0, length - 1))

    def last(self, index: int) -> Piece:
        return index, len(self.keys[index]) - 1, 1

    def decode(self, *indexes: int) -> torch.Tensor:
        return torch.cat(self.compute(*(self.last(index) for index in indexes)))


LENS = st.lists(st.one_of(st.integers(1, 80), st.sampled_from([511, 512, 513, 1025, 1300])), min_size=1, max_size=6)


@pytest.mark.parametrize("weight_format", ["float32", "float16", "bfloat16"])
@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, lens=LENS, seed=st.integers(0, 99))
def test_decodes_attend_to_their_own_context(weight_format: str, shape: Shape, lens: list[int], seed: int) -> None:
    """Scattered blocks, one segment or more, any number of heads; beside the formula, and bitwise as alone."""
    contexts = Contexts(shape, lens, weight_format, seed)
    indexes = np.random.default_rng(seed).permutation(len(lens)).tolist()
    together = contexts.decode(*indexes)
    half_ulp = 2.0**-8 if together.dtype is torch.bfloat16 else 0
    for row, index in enumerate(indexes):
        exact, *_ = contexts.exact(contexts.last(index))
        error = 1e-5 * exact.abs().max().clamp(min=1)
        assert_near(together[row], exact[0], half_ulp, error, together.dtype)
        assert torch.equal(contexts.decode(index)[0], together[row])


def test_what_others_left_in_a_block_is_not_read() -> None:
    """A block comes back with the keys and values of whoever had it before, whatever they were."""
    contexts = Contexts((1, 2, 16, 8), [5], "float16", 0)
    before = contexts.decode(0)
    attention: Any = contexts.attention
    for table in (attention._keys[0], attention._values[0].mT):
        table[..., 5:] = torch.nan
    assert torch.equal(contexts.decode(0), before)
