"""Prompts that attend in runs of tokens: beside float64, and bitwise the same however they are cut."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.torch_core.attention import MAX_LOOKUP_TOKENS
from engine.torch_core.kernels.layout import QUERY_BLOCK
from engine.torch_core.linear import input_dtype
from tests.helpers.cached_sequences import CachedSequences, Piece, Shape
from tests.helpers.kernel_checks import BAD, SEEDS, assert_near, at_an_end, threads
from tests.helpers.loaded_kernels import kernels, require_tiles

SHAPES = st.tuples(
    st.integers(1, 2), st.integers(1, 8), st.sampled_from([32, 64, 96, 128]), st.sampled_from([32, 64, 96])
)
SHORTEST = MAX_LOOKUP_TOKENS + 1  # of the chunks that are prefilled
COUNTS = st.integers(SHORTEST, 300) | st.sampled_from([16, 17, 32, 33, 63, 64, 65, 96, 128])
STARTS = st.integers(0, 200) | st.sampled_from([0, 32, 64, 96])

HALF_ULPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # of a number itself
FLOAT_HALF_ULP = HALF_ULPS[torch.float32]

some = settings(max_examples=80)
few = settings(max_examples=50)


@pytest.fixture(scope="module", params=["float32", "float16", "bfloat16"])
def weight_format(request: pytest.FixtureRequest) -> str:
    """bfloat16: by the CPU's matrix unit."""
    if request.param == "bfloat16":
        require_tiles()
    weight_format: str = request.param
    return weight_format


def prompts(weight_format: str, shape: Shape, lens: list[int], seed: int) -> CachedSequences:
    sequences = CachedSequences(shape, lens, weight_format, seed)
    assert sequences.attention.attends_by_tiles == (weight_format == "bfloat16")
    return sequences


def assert_prefilled(output: Tensor, sequences: CachedSequences, piece: Piece) -> None:
    """Beside float64 from what a product makes of queries, keys and values: bfloat16 of them, or what they are.

    Beyond that weights are rounded, and the result. The rest is float32: sums of so many products make a score, off by
    so much of their magnitudes; an error of a score is one of its weight and of the sum of all.
    """
    dtype = sequences.attention.output_dtype
    exact, spread, magnitude = sequences.exact(piece, dtype)
    _, start, count = piece
    score_error = (sequences.spec.head_dim + 4) * FLOAT_HALF_ULP * magnitude
    error = HALF_ULPS[dtype] + 2 * score_error + 2 * (start + count + 40) * FLOAT_HALF_ULP
    assert_near(output, exact, HALF_ULPS[dtype], 1.01 * error * spread, dtype)


@some
@given(shape=SHAPES, runs=st.lists(st.tuples(STARTS, COUNTS), min_size=1, max_size=3), seed=SEEDS)
def test_prompts_attend_to_all_before_and_none_after(
    weight_format: str, shape: Shape, runs: list[tuple[int, int]], seed: int
) -> None:
    """Several at once, from the start or from the middle of a block, and others that decode in the same step."""
    decoding = [1, 40, 97]
    sequences = prompts(weight_format, shape, [*(start + count for start, count in runs), *decoding], seed)
    pieces = [(index, *run) for index, run in enumerate(runs)]
    decodes = [(len(runs) + number, length - 1, 1) for number, length in enumerate(decoding)]
    for index, start, _ in [*pieces, *decodes]:
        if start:
            sequences.compute((index, 0, start))
    mixed = [(pieces + decodes)[place] for place in np.random.default_rng(seed).permutation(len(pieces + decodes))]
    for piece, output in zip(mixed, sequences.compute(*mixed), strict=True):
        if piece in pieces:
            assert_prefilled(output, sequences, piece)
        else:
            exact, spread, _ = sequences.exact(piece)
            assert_near(output, exact, HALF_ULPS[output.dtype], 1e-5 * spread, sequences.attention.output_dtype)


def cuts(length: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Chunks of a prompt: first token, number of tokens."""
    edges, lo = [0], 0
    while length - lo >= 2 * SHORTEST:
        lo += int(rng.integers(SHORTEST, min(100, length - lo - SHORTEST) + 1))
        edges.append(lo)
    return list(zip(edges, np.diff([*edges, length]).tolist(), strict=True))


@few
@given(shape=SHAPES, lens=st.lists(COUNTS, min_size=2, max_size=3), seed=SEEDS)
def test_a_result_is_bitwise_the_same_however_the_prompt_is_cut(
    weight_format: str, shape: Shape, lens: list[int], seed: int
) -> None:
    """In any blocks of the cache, beside any others, by any threads."""
    with threads(1):
        sequences = prompts(weight_format, shape, lens, seed)
        expected = [sequences.compute((index, 0, length))[0] for index, length in enumerate(lens)]
    rng = np.random.default_rng(seed)
    for count in (1, 2):
        with threads(count):
            sequences.renew(seed + count)
            waiting = [[(index, *cut) for cut in cuts(length, rng)] for index, length in enumerate(lens)]
            results: list[list[Tensor]] = [[] for _ in lens]
            while waiting:
                step = [waiting[place].pop(0) for place in rng.permutation(len(waiting))]
                for (index, *_), output in zip(step, sequences.compute(*step), strict=True):
                    results[index].append(output)
                waiting = [pieces for pieces in waiting if pieces]
        for result, whole in zip(results, expected, strict=True):
            assert torch.equal(torch.cat(result), whole)


@few
@given(shape=SHAPES, run=st.tuples(STARTS, COUNTS), seed=SEEDS)
def test_what_others_left_in_a_block_is_not_read(
    weight_format: str, shape: Shape, run: tuple[int, int], seed: int
) -> None:
    """Nor what the workspaces hold."""
    start, count = run

    def compute() -> list[Tensor]:
        before = sequences.compute((0, 0, start)) if start else []
        return before + sequences.compute((0, start, count))

    sequences = prompts(weight_format, shape, [start + count], seed)
    expected = compute()
    sequences.renew(seed + 1)
    rng = np.random.default_rng(seed)
    attention: Any = sequences.attention
    for table in (attention._keys[0], attention._values[0]):
        left = rng.choice(np.array([np.nan, np.inf, -np.inf, 65504], dtype=np.float32), table.shape)
        table.copy_(torch.from_numpy(left))
    attention._prompt_workspaces.fill_(255)
    for output, one in zip(compute(), expected, strict=True):
        assert torch.equal(output, one)


@few
@given(
    shape=SHAPES,
    count=COUNTS,
    name=st.sampled_from(["queries", "keys", "values"]),
    bad=BAD,
    seed=SEEDS,
)
def test_what_is_not_a_number_stays_in_its_sequence(
    weight_format: str, shape: Shape, count: int, name: str, bad: float, seed: int
) -> None:
    """Of which all later tokens see it."""
    lens = [count, 70, 40]
    step = [(0, 0, count), (1, 0, 70), (2, 39, 1)]
    sequences = prompts(weight_format, shape, lens, seed)
    sequences.compute((2, 0, 39))
    expected = sequences.compute(*step)
    rng = np.random.default_rng(seed)
    x = getattr(sequences, name)[0]
    token, head, column = (int(rng.integers(size)) for size in x.shape)
    x[token, head, column] = bad
    damaged, *others = sequences.compute(*step)
    for output, one in zip(others, expected[1:], strict=True):
        assert torch.equal(output, one)
    by_head = damaged.view(count, sequences.spec.num_kv_heads, -1, sequences.spec.head_dim)
    if name == "queries":
        assert not damaged[token].isfinite().all()
        damaged[token] = expected[0][token]
        assert torch.equal(damaged, expected[0])
    elif name == "keys":
        assert torch.equal(damaged[:token], expected[0][:token])
        if np.isnan(bad):
            assert by_head[token:, head].isnan().all()
    elif np.isnan(bad) or weight_format == "float32":
        assert not by_head[token:, head, :, column].isfinite().any()
        before = token // QUERY_BLOCK * QUERY_BLOCK  # a weight of 0 times what is not a finite number is none
        assert torch.equal(damaged[:before], expected[0][:before])
    else:  # the cache holds the greatest value that it has
        assert damaged.isfinite().all()
        assert torch.equal(damaged[:token], expected[0][:token])


NUM_KEYS = 150
GREAT = 128.0 * 78  # scores are 128 times what bfloat16 has, and so exact
SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "one far above": lambda t: GREAT * (t == 70),
    "one far below": lambda t: -GREAT * (t == 70),
    "all great": lambda t: GREAT * (t >= 0),
    "all low": lambda t: -GREAT * (t >= 0),
    "in turns": lambda t: GREAT * (2 * (t % 2) - 1),
    "rising": lambda t: 128.0 * (t - 75),
    "rising slowly": lambda t: 0.25 * t,
    "falling": lambda t: 128.0 * (75 - t),
    "falling slowly": lambda t: -0.25 * t,
}


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("block_size", [32, 64, 96])
def test_scores_of_any_size(weight_format: str, scores: Callable[[Tensor], Tensor], block_size: int) -> None:
    """Weights follow from their differences."""
    piece = (0, 0, NUM_KEYS)
    sequences = prompts(weight_format, (2, 3, 64, block_size), [NUM_KEYS], 0)
    sequences.queries[0].zero_()[..., 0] = 128 * 64**0.5
    sequences.keys[0][..., 0] = scores(torch.arange(NUM_KEYS))[:, None] / 128
    (output,) = sequences.compute(piece)
    dtype = sequences.attention.output_dtype
    exact, spread, _ = sequences.exact(piece, dtype)
    assert_near(output, exact, HALF_ULPS[dtype], 1.01 * (HALF_ULPS[dtype] + 1e-5) * spread, dtype)


GUARD = 4096  # bytes


@few
@given(shape=SHAPES, run=st.tuples(STARTS, COUNTS), count=st.sampled_from([1, 2]), seed=SEEDS)
def test_nothing_beside_results_and_workspaces_is_written(
    weight_format: str, shape: Shape, run: tuple[int, int], count: int, seed: int
) -> None:
    with threads(count):
        sequences = prompts(weight_format, shape, [sum(run)], seed)
    attention: Any = sequences.attention
    if run[0]:
        sequences.compute((0, 0, run[0]))
    (expected,) = sequences.compute((0, *run))
    sequences.begin((0, *run))
    guards = []
    for name in ("_prompt_workspaces", "_output"):
        before = getattr(attention, name)
        whole = torch.full((before.nbytes + 2 * GUARD,), 0x5A, dtype=torch.uint8)
        setattr(attention, name, whole[GUARD:-GUARD].view(before.dtype).view(before.shape))
        guards += [whole[:GUARD], whole[-GUARD:]]
    (output,) = sequences.attend()
    assert torch.equal(output, expected)
    assert all((guard == 0x5A).all() for guard in guards)


def test_no_byte_behind_what_is_given_is_touched(weight_format: str) -> None:
    """The process would die."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(attend_at_ends_of_memory, weight_format).result(timeout=100)


def attend_at_ends_of_memory(weight_format: str) -> None:
    for start, count, shape in [(0, 5, (1, 1, 32, 32)), (40, 100, (2, 3, 64, 32)), (96, 32, (1, 8, 128, 96))]:
        sequences = prompts(weight_format, shape, [start + count], count)
        attention: Any = sequences.attention
        tables = (at_an_end(attention._keys[0]), at_an_end(attention._values[0]))
        attention._addresses = [tuple(table.data_ptr() for table in tables)]
        attention._prompt_workspaces = at_an_end(attention._prompt_workspaces)
        if start:
            sequences.compute((0, 0, start))
        sequences.begin((0, start, count))
        sequences.rows = tuple(at_an_end(part) for part in sequences.rows)
        attention._output = at_an_end(attention._output)
        attention._prefills = [replace(one, blocks=at_an_end(one.blocks)) for one in attention._prefills]
        assert_prefilled(sequences.attend()[0], sequences, (0, start, count))


@pytest.mark.parametrize(
    ("head_dim", "block_size", "without_tiles"),
    [(48, 32, False), (64, 16, False), (64, 48, False), (6, 1, False), (33, 5, False), (64, 32, True)],
)
@pytest.mark.parametrize("run", [(0, 5), (0, 130), (50, 77)])
@pytest.mark.parametrize("weight_format", ["float32", "float16", "bfloat16"])
def test_other_sizes_and_cpus_do_without_tiles(
    weight_format: str, head_dim: int, block_size: int, without_tiles: bool, run: tuple[int, int]
) -> None:
    sequences = CachedSequences((2, 3, head_dim, block_size), [sum(run), 9], weight_format, 0, without_tiles)
    dtype = input_dtype(weight_format, kernels(without_tiles))
    assert not sequences.attention.attends_by_tiles
    assert sequences.attention.output_dtype is dtype
    if run[0]:
        sequences.compute((0, 0, run[0]))
    sequences.compute((1, 0, 8))
    pieces = [(0, *run), (1, 8, 1)]
    for piece, output in zip(pieces, sequences.compute(*pieces), strict=True):
        exact, spread, _ = sequences.exact(piece)
        assert_near(output, exact, HALF_ULPS[dtype], 1e-5 * spread, dtype)
