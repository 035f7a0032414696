"""Decode steps that are repeated from a recording, beside the same steps through Python: bitwise the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model_files import read_json
from engine.torch_core import attention as attention_module
from engine.torch_core import recorded_steps
from engine.torch_core.attention import CpuAttention
from engine.torch_core.batch import StepBatch, build_batch
from engine.torch_core.model import Model
from engine.torch_core.model_spec import read_spec
from engine.torch_core.recorded_steps import RecordedSteps, _Watch
from engine.torch_core.request import sequences_of
from engine.torch_core.scheduler import Chunk
from engine.torch_core.weights import Checkpoint
from tests.helpers.kernel_checks import threads
from tests.helpers.loaded_kernels import kernels, require_tiles
from tests.helpers.tiny_models import VOCAB_SIZE, request, save_tiny_model

BLOCK_SIZE = 32
NUM_BLOCKS = 60
CONTEXT = 150  # tokens in the cache before a step, of every sequence
SEGMENT = 64
MAX_ROWS = 200

Rows = list[tuple[int, int, int]]  # of a step: sequence, first position, number of its rows


class Side:
    """One model with its own cache, filled with the same prompts on each side."""

    def __init__(
        self, folder: Path, weight_format: str, monkeypatch: pytest.MonkeyPatch, by_lists: bool = True
    ) -> None:
        monkeypatch.setattr(attention_module, "SEGMENT_TOKENS", SEGMENT)
        spec, loaded = read_spec(read_json(folder, "config.json")), kernels()
        self.model = Model(
            spec,
            Checkpoint(folder),
            weight_format=weight_format,
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_len=spec.max_position,
            kernels=loaded,
        )
        self.attention = CpuAttention(spec, NUM_BLOCKS, BLOCK_SIZE, weight_format, loaded)
        self.steps = RecordedSteps(self.model, self.attention, loaded, MAX_ROWS)
        if not by_lists:
            self.steps._torch_computes = True
        rng = np.random.default_rng(0)
        tables = rng.permutation(NUM_BLOCKS).reshape(10, -1).tolist()
        self.sequences = []
        for index, table in enumerate(tables):
            prompt = rng.integers(2, VOCAB_SIZE, 6 * BLOCK_SIZE).astype(np.uint32)
            (sequence,) = sequences_of(request(f"r{index}", prompt), 512, (), 0)
            sequence.block_table = table
            self.sequences.append(sequence)
            self.compute(self.batch([Chunk(sequence, 0, CONTEXT)]))

    def batch(self, chunks: list[Chunk]) -> StepBatch:
        return build_batch(chunks, BLOCK_SIZE, 4)

    def compute(self, batch: StepBatch) -> torch.Tensor:
        """As ``Runner.forward`` does."""
        with torch.inference_mode():
            token_ids = torch.from_numpy(batch.token_ids)
            hidden = self.steps.run(batch, token_ids)
            if hidden is None:
                self.attention.begin(batch)
                hidden = self.model.forward(token_ids, torch.from_numpy(batch.positions), self.attention)
            return hidden

    def step(self, rows: Rows) -> torch.Tensor:
        return self.compute(self.batch([Chunk(self.sequences[index], *place) for index, *place in rows]))

    @property
    def kept(self) -> list[tuple[int, bool]]:
        return list(self.steps._kept)


def steps(longest: int) -> st.SearchStrategy[list[Rows]]:
    """With contexts of one segment or several; chunks of more than 4 rows are prefilled."""
    row = st.tuples(st.integers(0, 9), st.integers(1, CONTEXT - 1), st.integers(1, longest))
    return st.lists(st.lists(row, min_size=1, max_size=9, unique_by=lambda row: row[0]), min_size=1, max_size=6)


@pytest.mark.parametrize("longest", [1, 4, 20])
@pytest.mark.parametrize(
    ("family", "weight_format"),
    [("llama3", "bfloat16"), ("llama3", "float16"), ("llama3", "int8"), ("qwen3", "float32")],
)
def test_steps_by_lists_are_bitwise_the_same(family: str, weight_format: str, longest: int, tmp_path: Path) -> None:
    """Any rows in any order of steps, over scattered blocks."""
    if weight_format == "bfloat16":
        require_tiles()
    folder = save_tiny_model(family, tmp_path)
    with pytest.MonkeyPatch.context() as monkeypatch:
        plain = Side(folder, weight_format, monkeypatch, by_lists=False)
        listed = Side(folder, weight_format, monkeypatch)

        @settings(max_examples=30, deadline=None)
        @given(all_rows=steps(longest))
        def check(all_rows: list[Rows]) -> None:
            for rows in all_rows:
                assert torch.equal(listed.step(rows), plain.step(rows))

        check()
        assert listed.steps._torch_computes is False
        assert len(listed.kept) > 3
        assert plain.kept == []


def test_a_result_stays_while_the_next_step_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(save_tiny_model("llama3", tmp_path), "float16", monkeypatch)
    rows = [(0, 20, 1), (1, 130, 1)]
    side.step(rows)
    first = side.step(rows)
    kept = first.clone()
    side.step([(2, 100, 1), (3, 9, 1)])
    assert torch.equal(first, kept)
    assert torch.equal(side.step(rows), kept)


def test_one_thread_repeats_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_model("llama3", tmp_path)
    rows = [(0, 20, 1), (1, 130, 1), (5, 77, 1)]
    results = []
    for count in (1, 2):
        with threads(count):
            side = Side(folder, "float16", monkeypatch)
            results += [side.step(rows), side.step(rows)]
            assert side.kept == [(3, True)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_there_are_no_lists_where_torch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its part would be left out."""
    folder = save_tiny_model("llama3", tmp_path)
    plain = Side(folder, "float16", monkeypatch)
    side = Side(folder, "float16", monkeypatch)
    side.steps = RecordedSteps(side.model, side.attention, kernels(), MAX_ROWS)  # as before the first step
    layers = side.model._layers
    down = layers[0].down
    layers[0] = replace(layers[0], down=lambda x: down(x).clone())
    for rows in ([(0, 20, 1), (1, 130, 1)], [(0, 20, 1), (1, 130, 1)], [(0, 21, 1), (1, 130, 9)]):
        assert torch.equal(side.step(rows), plain.step(rows))
    assert side.kept == []


def test_lists_are_kept_of_few_rows_without_prefills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(save_tiny_model("llama3", tmp_path), "float16", monkeypatch)
    assert side.kept == []  # the prompts
    monkeypatch.setattr(recorded_steps, "KEPT_ROWS", 3)
    side.step([(index, 20, 1) for index in range(4)])
    side.step([(0, 20, 1), (1, 20, 9)])
    assert side.kept == []
    side.step([(0, 20, 1), (1, 20, 2)])
    assert side.kept == [(3, False)]


def test_more_rows_than_were_foreseen_are_computed_without_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model("llama3", tmp_path)
    plain, side = Side(folder, "float16", monkeypatch), Side(folder, "float16", monkeypatch)
    side.steps = RecordedSteps(side.model, side.attention, kernels(), 3)
    rows = [(index, 20, 1) for index in range(4)]
    assert torch.equal(side.step(rows), plain.step(rows))
    assert side.kept == []


X = torch.ones(4, 6)
ACTIONS: dict[str, tuple[Callable[[], object], bool]] = {
    "view": (lambda: X.view(2, 12), False),
    "slice": (lambda: X[1:3], False),
    "split": (lambda: X.split_with_sizes((1, 5), 1), False),
    "same dtype": (lambda: X.float(), False),
    "other dtype": (lambda: X.bfloat16(), True),
    "in place": (lambda: X.add_(0), True),
    "sum": (lambda: X + X, True),
    "cat": (lambda: torch.cat([X, X]), True),
    "zeros": (lambda: torch.zeros(3), True),
    "number": (lambda: X.sum().item(), True),
    "memory that may be freed": (lambda: torch.empty(3), True),
}


@pytest.mark.parametrize(("action", "computes"), ACTIONS.values(), ids=ACTIONS)
def test_what_torch_computes_is_noticed(action: Callable[[], object], computes: bool) -> None:
    with torch.inference_mode(), _Watch() as watch:
        action()
    assert watch.computes == computes
