"""The CPU's attention: its parts against plain formulas, and rows of a batch against the same rows alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.torch_core import prefill_attention
from engine.torch_core.attention import CpuAttention
from engine.torch_core.batch import build_batch
from engine.torch_core.model_spec import ModelSpec, read_spec
from engine.torch_core.prefill_attention import ATTEND, causal_mask
from engine.torch_core.request import sequences_of
from engine.torch_core.scheduler import Chunk
from tests.helpers.loaded_kernels import kernels
from tests.helpers.tiny_models import request

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


Shape = tuple[int, int, int, int]  # num_kv_heads, query heads of each, head_dim, block_size
SHAPES = st.tuples(
    st.integers(1, 3), st.integers(1, 4), st.sampled_from([2, 6, 16, 64]), st.sampled_from([1, 2, 8, 64])
)


def spec_of(shape: Shape) -> ModelSpec:
    num_kv_heads, group, head_dim, _ = shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 9,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": num_kv_heads * group,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    return read_spec(config)


class Contexts:
    """Sequences of random keys and values, in a cache whose blocks are scattered; their last tokens decode."""

    def __init__(self, shape: Shape, lens: list[int], weight_format: str, seed: int) -> None:
        spec, size = spec_of(shape), shape[-1]
        generator = torch.Generator().manual_seed(seed)
        num_blocks = sum(-(-length // size) for length in lens)
        free = iter(np.random.default_rng(seed).permutation(num_blocks).tolist())
        self.attention = CpuAttention(spec, num_blocks, size, weight_format, kernels())
        self.block_size = size
        self.sequences, self.queries, self.keys, self.values = [], [], [], []
        for index, length in enumerate(lens):
            (sequence,) = sequences_of(request(f"r{index}", [5] * length), length + 1, (), index)
            sequence.block_table = [next(free) for _ in range(-(-length // size))]
            self.sequences.append(sequence)
            self.queries.append(torch.randn(1, spec.num_heads, spec.head_dim, generator=generator) * 3)
            # Numbers that float16 has, so that the formula knows what the cache holds.
            keys, values = torch.randn(2, length, spec.num_kv_heads, spec.head_dim, generator=generator).half().float()
            self.keys.append(keys)
            self.values.append(values)
            if length > 1:  # all but the last token, whose output is of no interest
                self.run([Chunk(sequence, 0, length - 1)], torch.zeros(length - 1, *self.queries[0].shape[1:]), index)

    def run(self, chunks: list[Chunk], queries: torch.Tensor, *indexes: int) -> torch.Tensor:
        """Rows in the order of the chunks, which are of the sequences with these indexes."""
        batch = build_batch(chunks, self.block_size, 4)
        order = torch.from_numpy(np.argsort(np.concatenate(batch.row_of)))
        parts = [(self.keys[index], self.values[index]) for index in indexes]
        rows = [(chunk, *part) for chunk, part in zip(chunks, parts, strict=True)]
        keys = torch.cat([keys[chunk.start : chunk.end] for chunk, keys, _ in rows])
        values = torch.cat([values[chunk.start : chunk.end] for chunk, _, values in rows])
        self.attention.begin(batch)
        with torch.inference_mode():
            output = self.attention(0, queries[order], keys[order], values[order])
        return output[torch.from_numpy(np.concatenate(batch.row_of))]

    def decode(self, *indexes: int) -> torch.Tensor:
        chunks = [Chunk(self.sequences[index], len(self.keys[index]) - 1, 1) for index in indexes]
        return self.run(chunks, torch.cat([self.queries[index] for index in indexes]), *indexes)

    def exact(self, index: int) -> torch.Tensor:
        scale = self.queries[index].shape[-1] ** -0.5
        keys, values = self.keys[index].permute(1, 2, 0), self.values[index].transpose(0, 1)
        return exact_attention(self.queries[index] * scale, keys, values)


LENS = st.lists(st.one_of(st.integers(1, 80), st.sampled_from([511, 512, 513, 1025, 1300])), min_size=1, max_size=6)


@pytest.mark.parametrize("weight_format", ["float32", "float16"])
@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, lens=LENS, seed=st.integers(0, 99))
def test_decodes_attend_to_their_own_context(weight_format: str, shape: Shape, lens: list[int], seed: int) -> None:
    """Scattered blocks, one segment or more, any number of heads; beside the formula, and bitwise as alone."""
    contexts = Contexts(shape, lens, weight_format, seed)
    indexes = np.random.default_rng(seed).permutation(len(lens)).tolist()
    together = contexts.decode(*indexes)
    for row, index in enumerate(indexes):
        exact = contexts.exact(index)
        assert (together[row] - exact[0]).abs().max() < 1e-5 * exact.abs().max().clamp(min=1)
        assert torch.equal(contexts.decode(index)[0], together[row])


def test_what_others_left_in_a_block_is_not_read() -> None:
    """A block comes back with the keys and values of whoever had it before, whatever they were."""
    contexts = Contexts((1, 2, 16, 8), [5], "float16", 0)
    before = contexts.decode(0)
    attention: Any = contexts.attention
    for table in (attention._keys[0], attention._values[0].mT):
        table[..., 5:] = torch.nan
    assert torch.equal(contexts.decode(0), before)
