"""Decode steps that are repeated from a recording, beside the same steps through Python: bitwise the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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

Steps = list[list[tuple[int, int]]]  # for each step: sequence and position of its rows


class Side:
    """One model with its own cache, filled with the same prompts on each side."""

    def __init__(self, folder: Path, weight_format: str, most_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attention_module, "SEGMENT_TOKENS", SEGMENT)
        monkeypatch.setattr(recorded_steps, "MAX_ROWS", most_rows)
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
        self.steps = RecordedSteps(self.model, self.attention, loaded)
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

    def decode(self, rows: list[tuple[int, int]]) -> torch.Tensor:
        return self.compute(self.batch([Chunk(self.sequences[index], position, 1) for index, position in rows]))

    def recordings(self) -> list[Any]:
        return list(self.steps._recorded.values())


ROWS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, CONTEXT - 1)), min_size=1, max_size=9, unique_by=lambda row: row[0]
)


@pytest.mark.parametrize(
    ("family", "weight_format"),
    [("llama3", "bfloat16"), ("llama3", "float16"), ("llama3", "int8"), ("qwen3", "float32")],
)
def test_repeated_steps_are_bitwise_the_same(family: str, weight_format: str, tmp_path: Path) -> None:
    """Any rows with contexts of one segment or several, in any order of steps, over scattered blocks."""
    if weight_format == "bfloat16":
        require_tiles()
    folder = save_tiny_model(family, tmp_path)
    with pytest.MonkeyPatch.context() as monkeypatch:
        plain = Side(folder, weight_format, 0, monkeypatch)
        recorded = Side(folder, weight_format, 64, monkeypatch)
        monkeypatch.setattr(recorded_steps, "MAX_ROWS", 64)

        @settings(max_examples=60, deadline=None)
        @given(steps=st.lists(ROWS, min_size=1, max_size=6))
        def check(steps: Steps) -> None:
            for rows in steps:
                monkeypatch.setattr(recorded_steps, "MAX_ROWS", 0)
                expected = plain.decode(rows)
                monkeypatch.setattr(recorded_steps, "MAX_ROWS", 64)
                result = recorded.decode(rows)
                assert torch.equal(result, expected)

        check()
        assert plain.recordings() == []
        assert len(recorded.recordings()) > 5
        assert None not in recorded.recordings()


def test_a_result_stays_while_the_next_step_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(save_tiny_model("llama3", tmp_path), "float16", 64, monkeypatch)
    rows = [(0, 20), (1, 130)]
    side.decode(rows)
    first = side.decode(rows)
    kept = first.clone()
    side.decode([(2, 100), (3, 9)])
    assert torch.equal(first, kept)
    assert torch.equal(side.decode(rows), kept)


def test_one_thread_repeats_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_model("llama3", tmp_path)
    rows = [(0, 20), (1, 130), (5, 77)]
    results = []
    for count in (1, 2):
        with threads(count):
            side = Side(folder, "float16", 64, monkeypatch)
            results += [side.decode(rows), side.decode(rows)]
            assert None not in side.recordings()
    assert all(torch.equal(result, results[0]) for result in results)


def test_nothing_is_repeated_where_torch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its part would be left out."""
    side = Side(save_tiny_model("llama3", tmp_path), "float16", 64, monkeypatch)
    layers = side.model._layers
    down = layers[0].down
    layers[0] = replace(layers[0], down=lambda x: down(x).clone())
    rows = [(0, 20), (1, 130)]
    first = side.decode(rows)
    assert torch.equal(side.decode(rows), first)
    assert not torch.equal(side.decode([(0, 21), (1, 130)]), first)
    assert side.recordings() == [None]


def test_prefills_and_many_rows_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(save_tiny_model("llama3", tmp_path), "float16", 3, monkeypatch)
    assert side.recordings() == []  # the prompts
    with torch.inference_mode():
        for chunks in (
            [Chunk(side.sequences[index], 20, 1) for index in range(4)],
            [Chunk(side.sequences[0], 20, 1), Chunk(side.sequences[1], 20, 9)],
        ):
            batch = side.batch(chunks)
            assert side.steps.run(batch, torch.from_numpy(batch.token_ids)) is None
    assert side.recordings() == []


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
