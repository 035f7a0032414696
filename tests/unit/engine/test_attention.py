"""Rows that attend by themselves on a CPU: beside the formula, and in a batch as alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.cached_sequences import CachedSequences, Piece, Shape
from tests.helpers.kernel_checks import assert_near

SHAPES = st.tuples(
    st.integers(1, 3), st.integers(1, 4), st.sampled_from([2, 6, 16, 64]), st.sampled_from([1, 2, 8, 64])
)


class Contexts(CachedSequences):
    """All but the last tokens are in the cache; the last ones decode."""

    def __init__(self, shape: Shape, lens: list[int], weight_format: str, seed: int) -> None:
        super().__init__(shape, lens, weight_format, seed)
        for index, length in enumerate(lens):
            if length > 1:
                self.fill((index, 0, length - 1))

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
