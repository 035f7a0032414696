"""Sampled tokens against the exact distributions they should follow."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.torch_core.noise import noise_keys, uniforms
from engine.torch_core.request import Sequence, sequences_of
from engine.torch_core.sampler import Sampler, keep_likely
from tests.helpers.tiny_models import request

VOCAB_SIZE = 600
DRAWS = 4000
LOGITS = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 2


def sequences(count: int, prompt: tuple[int, ...] = (1, 2, 3), **sampling: Any) -> list[Sequence]:
    """Equal but for their seeds."""
    return [sequences_of(request(f"r{i}", prompt, seed=i, **sampling), 100, (0,), i)[0] for i in range(count)]


def draw(count: int = DRAWS, **sampling: Any) -> npt.NDArray[np.int64]:
    sampler = Sampler(VOCAB_SIZE, torch.device("cpu"))
    return sampler.sample(LOGITS.repeat(count, 1), sequences(count, **sampling)).read().token_ids


def filtered(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> npt.NDArray[np.float64]:
    """The exact distribution, the plain way: top_k, then top_p of what is left, and min_p."""
    probs = (LOGITS.double() / temperature).softmax(0).numpy()
    order = np.argsort(-probs)
    keep = np.zeros(VOCAB_SIZE, bool)
    ranked = order[: top_k or VOCAB_SIZE]
    share = probs[ranked] / probs[ranked].sum()
    keep[ranked[np.cumsum(share) - share < top_p]] = True
    keep &= probs >= min_p * probs.max()
    kept = np.where(keep, probs, 0)
    scaled: npt.NDArray[np.float64] = kept / kept.sum()
    return scaled


CASES = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 10},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 5.0, "top_p": 0.95},  # the nucleus is larger than the first candidates
    {"temperature": 1.3, "top_k": 300, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 10**9},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_distribution(case: dict[str, Any]) -> None:
    expected = filtered(**{key: min(value, VOCAB_SIZE) if key == "top_k" else value for key, value in case.items()})
    counts = np.bincount(draw(**case), minlength=VOCAB_SIZE)
    assert counts[expected == 0].sum() == 0
    common = expected * DRAWS >= 5  # chi-square needs some expected draws in each cell; the others are one cell
    cells = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * DRAWS
    cells, wanted = cells[wanted > 0], wanted[wanted > 0]
    chi_square = ((cells - wanted) ** 2 / wanted).sum()
    freedom = len(cells) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * max(freedom, 1)) + 4


def test_rows_do_not_influence_each_other() -> None:
    """One row's large top_k must not widen the others, nor change what they draw."""
    together = sequences(6, temperature=0.9, top_p=0.7) + sequences(6, temperature=0.0) + sequences(6, top_k=500)
    rows = torch.randn(18, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    sampler = Sampler(VOCAB_SIZE, torch.device("cpu"))
    batched = sampler.sample(rows.clone(), together).read().token_ids.tolist()
    alone = [int(sampler.sample(rows[i : i + 1].clone(), together[i : i + 1]).token_ids[0]) for i in range(18)]
    assert batched == alone
    assert batched[6:12] == rows[6:12].argmax(-1).tolist()


def test_tiny_temperature_is_greedy() -> None:
    assert set(draw(20, temperature=1e-30)) == {int(LOGITS.argmax())}


def test_ties_at_a_threshold_stay_in() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    one = torch.ones(1, 1)
    keep_likely(logits, (one * 2).long(), one, one * -torch.inf, 256)
    assert torch.isfinite(logits).tolist() == [[False, True, True, True, False]]


def test_penalties_exactly() -> None:
    (sequence,) = sequences(1, prompt=(1, 2), temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    sequence.sampling = type(sequence.sampling)(
        temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0, num_logprobs=0
    )
    sampler = Sampler(VOCAB_SIZE, torch.device("cpu"))
    for token in (3, 3, 4):  # the first two before the sampler has seen the sequence
        sequence.append(token)
        sampler.accept(sequence, token)
        if token == 3 and sequence.num_output_tokens == 2:
            sampler.sample(LOGITS[None].clone(), [sequence])
    logits = torch.ones(1, VOCAB_SIZE)
    logits[0, 2] = -1.0
    sampled = sampler.sample(logits, [sequence]).read()
    # repetition halves 1 and doubles -1, for prompt and output; the others count output tokens alone.
    assert logits[0, :6].tolist() == pytest.approx([1.0, 0.5, -2.0, 0.5 - 0.5 - 0.5, 0.5 - 0.25 - 0.5, 1.0])
    assert sampled.logprobs[0].logprobs[0, 0] == pytest.approx(-np.log(VOCAB_SIZE - 1 + np.exp(-2.0)))
    sampler.forget(sequence)
    assert not sampler._penalties._row_of


def test_noise_is_uniform_and_a_function_of_its_place() -> None:
    keys = noise_keys(list(range(200)), [0, 1] * 100)
    values = np.stack([uniforms(keys, np.full(200, position)) for position in range(200)])
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 0.005
    assert np.abs(np.histogram(values, 20)[0] - 2000).max() < 250
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.02
    assert len(np.unique(noise_keys([7, 7, 8, 8], [0, 1, 0, 1]))) == 4
    assert (uniforms(keys[3:5], np.array([9, 9])) == values[9, 3:5]).all()
    assert (noise_keys([2**63 - 1], [0]) == noise_keys([2**63 - 1], [0])).all()
