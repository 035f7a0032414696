"""Overlapping steps (the next one is queued before the tokens of the last one are read) change nothing that one sees.

On a GPU all steps overlap; here they are made to on a CPU.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.core import ChoiceOutput, EngineCore, EngineRequest
from tests.helpers.tiny_models import VOCAB_SIZE, drain, ids_of, make_engine, request, save_tiny_model
from tokservice.wire.messages import FinishReason, SamplingParams

PROMPT = list(range(2, 42))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, which guides need: a token for each byte."""
    folder = save_tiny_model("llama3", tmp_path_factory.mktemp("llama3"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB_SIZE - 2]
    vocabulary = {"<pad>": 0, "<eos>": 1} | {letter: 2 + i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def random_request(rng: random.Random, number: int) -> EngineRequest:
    """Everything that needs to know tokens before the next one is chosen."""
    sampling: dict[str, Any] = {
        "n": rng.choice([1, 1, 3]),
        "max_tokens": rng.randrange(1, 30),
        "seed": rng.getrandbits(60),
        "temperature": rng.choice([0.0, 0.8, 1.5]),
        "top_p": rng.choice([1.0, 0.8]),
        "top_k": rng.choice([0, 20]),
        "presence_penalty": rng.choice([0.0, 0.8]),
        "frequency_penalty": rng.choice([0.0, 0.4]),
        "repetition_penalty": rng.choice([1.0, 1.3]),
        "min_tokens": rng.choice([0, 0, 6]),
        "stop_token_ids": rng.choice([(), tuple(range(60))]),
        "bad_words_ids": rng.choice([(), tuple((a, b) for a in range(60) for b in range(9))]),
        "logit_bias_ids": rng.choice([(), (77, 78)]),
        "num_logprobs": rng.choice([-1, -1, 0, 3]),
        "num_prompt_logprobs": rng.choice([-1, -1, -1, 2]),
        "priority": rng.choice([0, 0, 1]),
    }
    sampling["logit_bias_values"] = (3.0, 3.0)[: len(sampling["logit_bias_ids"])]
    if rng.random() < 0.3:
        sampling["guide_kind"], sampling["guide"] = "regex", rng.choice(["[a-f]{3}-[0-9]{2,9}x", "(ab|cd)*", "[^a]+"])
    if rng.random() < 0.05:
        sampling["max_tokens"] = 0
    prompts = [
        np.array(rng.choice([[], PROMPT]) + [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.choice([1, 9, 60]))])
        for _ in range(rng.choice([1, 1, 2]))
    ]
    return EngineRequest(f"r{number}", 1, SamplingParams(**sampling), tuple(p.astype(np.uint32) for p in prompts))


def run(engine: EngineCore, rng: random.Random, requests: list[EngineRequest]) -> list[ChoiceOutput]:
    """Random arrivals, with aborts of others in between."""
    coming, outputs, num_noise = list(requests), [], 0
    while coming or engine.has_work():
        if coming and rng.random() < 0.3:
            engine.add(coming.pop())
        if num_noise < 8 and rng.random() < 0.1:
            num_noise += 1
            engine.add(request(f"noise{num_noise}", PROMPT, n=2, max_tokens=40, stop_token_ids=tuple(range(20))))
        if rng.random() < 0.1:
            engine.abort(f"noise{rng.randrange(9)}")
        outputs += engine.step()
    return outputs


def seen(outputs: list[ChoiceOutput], one: EngineRequest) -> list[Any]:
    """All that a client can see of a request, apart from how steps cut it."""
    choices = []
    for choice in range(one.num_choices):
        mine = [output for output in outputs if (output.request_id, output.choice) == (one.request_id, choice)]
        scores = [output.logprobs for output in mine if output.logprobs is not None]
        choices.append(
            (
                ids_of(mine, one.request_id, choice),
                [output.finish_reason for output in mine if output.finish_reason is not FinishReason.RUNNING],
                [(score.token_ids.tolist(), score.logprobs.tolist()) for score in scores],
                [output.prompt_logprobs.token_ids.tolist() for output in mine if output.prompt_logprobs is not None],
            )
        )
    return choices


def check(model_dir: Path, seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        settings: dict[str, Any] = {
            "deterministic": True,
            "block_size": rng.choice([8, 16, 32]),
            "max_num_batched_tokens": rng.choice([24, 128]),
            "kv_cache_tokens": 512,
            "prefix_caching": rng.random() < 0.7,
        }
        requests = [random_request(rng, number) for number in range(8)]
        plain = make_engine(model_dir, **settings)
        overlapping: Any = make_engine(model_dir, overlaps=True, **settings)
        expected, got = run(plain, random.Random(seed), requests), run(overlapping, random.Random(seed), requests)
        for one in requests:
            assert seen(got, one) == seen(expected, one), (seed, one)
        assert overlapping._in_flight is None
        assert overlapping.stats.kv_cache_used_tokens == 0
        assert not overlapping._sampler._guides
        assert not overlapping._sampler._penalties._row_of


def test_nothing_depends_on_the_overlap(model_dir: Path) -> None:
    """Each token would be wrong that is chosen, hashed or fed on while the one before is a placeholder."""
    check(model_dir, range(8))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_depends_on_the_overlap_in_many_histories(model_dir: Path) -> None:
    check(model_dir, range(1000, 1300))


def test_the_next_pass_is_queued_before_tokens_are_read(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole point: were it the other way around, the device would wait for the host in every step."""
    engine: Any = make_engine(model_dir, overlaps=True)
    events: list[str] = []
    forward, receive = type(engine._runner).forward, type(engine)._receive

    def noted_forward(*args: Any) -> Any:
        events.append("forward")
        return forward(*args)

    def noted_receive(*args: Any) -> Any:
        outputs = receive(*args)
        events.append(f"read {len(outputs)}")
        return outputs

    monkeypatch.setattr(type(engine._runner), "forward", noted_forward)
    monkeypatch.setattr(type(engine), "_receive", noted_receive)
    engine.add(request("r", PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True))
    assert len(ids_of(drain(engine), "r")) == 3
    assert events == ["forward", "read 0", "forward", "read 1", "forward", "read 1", "read 1"]


def test_an_end_by_a_stop_token_costs_one_row(model_dir: Path) -> None:
    """The row that was queued before the stop token was seen gives no output, and its blocks are free again."""
    engine: Any = make_engine(model_dir, overlaps=True)
    plain = make_engine(model_dir)
    plain.add(request("r", PROMPT, temperature=0.0, max_tokens=12, ignore_eos=True))
    ids = ids_of(drain(plain), "r")
    stop = next(token for token in ids[3:] if ids.index(token) >= 3)
    engine.add(request("r", PROMPT, temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,)))
    outputs = drain(engine)
    assert ids_of(outputs, "r") == ids[: ids.index(stop) + 1]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert engine.stats.kv_cache_used_tokens == 0
    assert engine.stats.num_output_tokens == ids.index(stop) + 1


@pytest.mark.parametrize("attempt", [0, 2])
def test_what_ends_while_its_token_is_sampled(model_dir: Path, attempt: int) -> None:
    """An abort, and a higher attempt, come between the queueing and the reading."""
    engine: Any = make_engine(model_dir, overlaps=True)
    one = request("r", PROMPT, temperature=0.0, max_tokens=6, ignore_eos=True)
    engine.add(one)
    outputs = engine.step() + engine.step()
    assert len(ids_of(outputs, "r")) == 1
    assert engine._in_flight is not None
    if attempt:
        so_far = (np.array(ids_of(outputs, "r"), np.uint32),)
        engine.add(EngineRequest("r", attempt, one.sampling, one.prompts, so_far, (FinishReason.RUNNING,)))
    else:
        engine.abort("r")
    later = drain(engine)
    assert {output.attempt for output in later} == {attempt or 1}
    assert [output.finish_reason for output in later if output.finish_reason is not FinishReason.RUNNING] == [
        FinishReason.LENGTH if attempt else FinishReason.ABORT
    ]
    assert len(ids_of(later, "r")) == (5 if attempt else 0)
    assert engine._in_flight is None
