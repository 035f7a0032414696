"""The CPU's attention: its parts against plain formulas, and rows of a batch against the same rows alone."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.model_files import read_json
from engine.torch_core import prefill_attention
from engine.torch_core.attention import CpuAttention
from engine.torch_core.batch import LookupGroup, build_batch, merge_groups
from engine.torch_core.model_spec import read_spec
from engine.torch_core.prefill_attention import ATTEND, causal_mask
from engine.torch_core.request import sequences_of
from engine.torch_core.scheduler import Chunk
from tests.helpers.tiny_models import request, save_tiny_model

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


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), min_size=1, max_size=8), st.integers(0, 200))
def test_merged_groups_hold_the_same_rows(shape: list[tuple[int, int]], max_padding: int) -> None:
    groups, lo = [], 0
    for exponent, num_rows in enumerate(count for count, skipped in shape if not skipped % 2):
        rows = np.arange(lo, lo + num_rows)
        groups.append(LookupGroup(lo, lo + num_rows, 1 << exponent, rows * 10, rows * 7))
        lo += num_rows
    merged = merge_groups(groups, max_padding)
    assert [row for group in merged for row in range(group.lo, group.hi)] == list(range(lo))
    for group in merged:
        parts = [part for part in groups if group.lo <= part.lo < group.hi]
        assert group.width == parts[-1].width
        assert sum((part.hi - part.lo) * (group.width - part.width) for part in parts) <= max_padding
        assert np.array_equal(group.context_lens, np.arange(group.lo, group.hi) * 10)
        assert np.array_equal(group.block_starts, np.arange(group.lo, group.hi) * 7)
    if max_padding == 0:
        assert [group.width for group in merged] == [group.width for group in groups]
    for narrow, wide in itertools.pairwise(merged):  # no two that had room for each other
        parts = [part for part in groups if narrow.lo <= part.lo < wide.hi]
        widest = max(part.width for part in parts if part.hi <= narrow.hi)
        joined = [part for part in parts if part.lo >= wide.lo or part.width == widest]
        assert sum((part.hi - part.lo) * (wide.width - part.width) for part in joined) > max_padding


@pytest.mark.parametrize(("weight_format", "tolerance"), [("float32", 1e-6), ("float16", 2e-3)])
def test_padding_changes_no_row(tmp_path: Path, weight_format: str, tolerance: float) -> None:
    """Rows with contexts of 1 to 200 tokens in one padded group, against groups without padding."""
    save_tiny_model("llama3", tmp_path)
    spec = read_spec(read_json(tmp_path, "config.json"))
    free = iter(np.random.default_rng(0).permutation(64).tolist())
    prompts, last_tokens = [], []
    for length in (2, 8, 9, 40, 200):
        (sequence,) = sequences_of(request(f"r{length}", [5] * length), 512, (), 0)
        sequence.block_table = [next(free) for _ in range(-(-length // 8))]
        prompts.append(Chunk(sequence, 0, length - 1))
        last_tokens.append(Chunk(sequence, length - 1, 1))
    prefill, decode = build_batch(prompts, 8, 1), build_batch(last_tokens, 8, 1)

    def run(max_padding: int) -> torch.Tensor:
        attention = CpuAttention(spec, 64, 8, weight_format, max_padding)
        torch.manual_seed(0)
        for batch in (prefill, decode):
            attention.begin(batch)
            num_rows, dim = len(batch.token_ids), spec.head_dim
            query = torch.randn(num_rows, spec.num_heads, dim)
            output = attention(0, query, *torch.randn(2, num_rows, spec.num_kv_heads, dim))
        return output

    apart, padded = run(0), run(10_000)
    assert len(decode.groups) == 4
    assert (padded - apart).abs().max() < tolerance * apart.abs().max()
