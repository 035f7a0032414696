"""The deterministic mode: a choice's ids do not depend on batch-mates, chunking, preemption, cache or restarts,

nor on whether the next step begins before the last one's tokens are read, as on a GPU.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.core import EngineCore, EngineRequest
from tests.helpers.tiny_models import VOCAB_SIZE, ids_of, make_engine, save_tiny_model
from tokservice.models.default_model import ensure_default_model
from tokservice.wire.messages import FinishReason, SamplingParams


def random_request(rng: random.Random, name: str, prefixes: list[list[int]]) -> EngineRequest:
    prompts = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        own = [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.choice([1, 5, 20, 70, 130]))]
        prompts.append(np.array(rng.choice([[], *prefixes]) + own, np.uint32))
    sampling: dict[str, Any] = {
        "n": rng.choice([1, 1, 2]),
        "max_tokens": rng.randrange(1, 25),
        "seed": rng.getrandbits(60),
    }
    sampling["temperature"] = rng.choice([0.0, 0.3, 1.0, 1.5])
    sampling["top_p"] = rng.choice([1.0, 0.9, 0.5])
    sampling["top_k"] = rng.choice([0, 1, 7, 255, 300])
    sampling["min_p"] = rng.choice([0.0, 0.02])
    sampling["presence_penalty"] = rng.choice([0.0, 0.5])
    sampling["repetition_penalty"] = rng.choice([1.0, 1.2])
    sampling["min_tokens"] = rng.choice([0, 4])
    sampling["stop_token_ids"] = rng.choice([(), tuple(range(40))])
    sampling["bad_words_ids"] = rng.choice([(), tuple((first, second) for first in range(40) for second in range(9))])
    sampling["priority"] = rng.choice([0, 1])
    return EngineRequest(name, 1, SamplingParams(**sampling), tuple(prompts))


def outputs_of(engine: EngineCore, one: EngineRequest) -> list[list[int]]:
    """Every choice's ids, computed while nothing else runs."""
    engine.add(one)
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return [ids_of(outputs, one.request_id, choice) for choice in range(one.num_choices)]


def busy_outputs(rng: random.Random, engine: EngineCore, requests: list[EngineRequest]) -> dict[str, list[list[int]]]:
    """The same under random arrivals, unrelated aborted requests, and restarts from the journal."""
    got = {one.request_id: [[] for _ in range(one.num_choices)] for one in requests}  # type: dict[str, list[list[int]]]
    ends = {one.request_id: [FinishReason.RUNNING] * one.num_choices for one in requests}
    attempts = {one.request_id: 1 for one in requests}
    coming = list(requests)
    noise = 0
    while coming or engine.has_work():
        if coming and rng.random() < 0.4:
            engine.add(coming.pop())
        if noise < 10 and rng.random() < 0.2:
            noise += 1
            engine.add(random_request(rng, f"noise{noise}", []))
            if rng.random() < 0.7:
                engine.abort(f"noise{rng.randrange(noise) + 1}")
        started = [one for one in requests if one not in coming and FinishReason.RUNNING in ends[one.request_id]]
        if started and rng.random() < 0.04:
            one = rng.choice(started)
            name = one.request_id
            attempts[name] += 1
            journal = tuple(np.array(ids, np.uint32) for ids in got[name])
            engine.add(EngineRequest(name, attempts[name], one.sampling, one.prompts, journal, tuple(ends[name])))
        for output in engine.step():
            if output.request_id in got:
                assert output.attempt == attempts[output.request_id]
                got[output.request_id][output.choice] += output.token_ids
                assert ends[output.request_id][output.choice] is FinishReason.RUNNING
                ends[output.request_id][output.choice] = output.finish_reason
    assert all(FinishReason.RUNNING not in reasons for reasons in ends.values())
    return got


def check_histories(model_dir: Path, count: int, seed: int, threads: int = 2, overlaps: bool = False) -> None:
    rng = random.Random(seed)
    prefixes = [[rng.randrange(2, VOCAB_SIZE) for _ in range(length)] for length in (33, 80)]
    alone = make_engine(model_dir, deterministic=True, block_size=16, prefix_caching=False)
    for budget, kv_cache_tokens, num_threads in ((16, 512, 1), (64, 700, threads), (128, 2048, threads)):
        engine = make_engine(
            model_dir,
            deterministic=True,
            block_size=16,
            max_num_batched_tokens=budget,
            kv_cache_tokens=kv_cache_tokens,
            threads=num_threads,
            overlaps=overlaps,
        )
        reference = make_engine(model_dir, deterministic=True, block_size=16) if budget == 16 else alone
        for history in range(count):
            requests = [random_request(rng, f"{history}-{i}", prefixes) for i in range(6)]
            busy = busy_outputs(rng, engine, requests)
            for one in requests:
                assert busy[one.request_id] == outputs_of(reference, one), one
        assert engine.stats.kv_cache_used_tokens == 0


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_ids_do_not_depend_on_the_history(tmp_path: Path, family: str, overlaps: bool) -> None:
    check_histories(save_tiny_model(family, tmp_path), 2, seed=1, threads=1, overlaps=overlaps)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 110))  # in pieces: each ends within a minute or two
@pytest.mark.parametrize("overlaps", [False, True])
def test_ids_do_not_depend_on_a_thousand_histories(tmp_path: Path, overlaps: bool, seed: int) -> None:
    check_histories(save_tiny_model("qwen3", tmp_path), 34, seed=seed, overlaps=overlaps)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ids_of_the_default_model_do_not_depend_on_the_history() -> None:
    check_histories(ensure_default_model(), 3, seed=3)
