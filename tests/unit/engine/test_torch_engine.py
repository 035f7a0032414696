"""The torch engine as its driver sees it: how choices begin, continue and end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.core import ChoiceOutput, EngineCore, EngineRequest, RequestRefused
from tests.helpers.tiny_models import (
    assert_empty,
    drain,
    ids_of,
    make_engine,
    reference_model,
    request,
    run_alone,
    save_tiny_model,
)
from tokservice.wire.messages import FinishReason, SamplingParams

PROMPT = list(range(2, 42))
EOS = 1


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama3", tmp_path_factory.mktemp("llama3"))


@pytest.fixture
def engine(model_dir: Path) -> EngineCore:
    return make_engine(model_dir)


def greedy(engine: EngineCore, **sampling: Any) -> list[int]:
    return run_alone(engine, request("greedy", PROMPT, temperature=0.0, **sampling))


def finals(outputs: list[ChoiceOutput]) -> list[FinishReason]:
    return [output.finish_reason for output in outputs if output.finish_reason is not FinishReason.RUNNING]


def test_length_and_context_limit(engine: EngineCore) -> None:
    assert len(greedy(engine, max_tokens=7, ignore_eos=True)) == 7
    length = engine.limits.max_model_len
    engine.add(request("r", np.arange(length - 3) % 200 + 2, max_tokens=50, ignore_eos=True))
    outputs = drain(engine)
    assert len(ids_of(outputs, "r")) == 3
    assert finals(outputs) == [FinishReason.LENGTH]
    assert_empty(engine)


def test_each_prompt_has_its_own_room(engine: EngineCore) -> None:
    prompts = tuple(np.arange(length, dtype=np.uint32) % 200 + 2 for length in (engine.limits.max_model_len - 3, 20))
    engine.add(EngineRequest("r", 1, SamplingParams(max_tokens=8, ignore_eos=True), prompts))
    outputs = drain(engine)
    assert [len(ids_of(outputs, "r", choice)) for choice in range(2)] == [3, 8]
    assert finals(outputs) == [FinishReason.LENGTH] * 2


def test_stop_token_is_the_last_id(engine: EngineCore) -> None:
    plain = greedy(engine, max_tokens=12, ignore_eos=True)
    stop = plain[5]
    assert greedy(engine, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,)) == plain[: plain.index(stop) + 1]


def test_eos_ends_unless_ignored_and_waits_for_min_tokens(model_dir: Path, tmp_path: Path) -> None:
    plain = greedy(make_engine(model_dir), max_tokens=12, ignore_eos=True)
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [250, plain[3]]}))
    engine = make_engine(tmp_path)
    assert engine.limits.eos_token_ids == tuple(sorted({EOS, 250, plain[3]}))
    engine.add(request("r", PROMPT, temperature=0.0))
    outputs = drain(engine)
    assert ids_of(outputs, "r") == plain[: plain.index(plain[3]) + 1]
    assert finals(outputs) == [FinishReason.STOP]
    later = greedy(engine, max_tokens=12, min_tokens=8)
    assert not set(later[:8]) & {EOS, 250, plain[3]}
    assert greedy(engine, max_tokens=12, ignore_eos=True) == plain


def test_padding_of_the_vocabulary_stands_for_no_token(model_dir: Path, tmp_path: Path) -> None:
    """Models have rows of logits beyond the tokenizer's ids: what was sampled there had no text."""
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    vocabulary = {f"t{token}": token for token in range(200)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    engine = make_engine(tmp_path)
    scored = {"num_logprobs": 20, "num_prompt_logprobs": 20}
    engine.add(request("r", PROMPT, temperature=100.0, max_tokens=100, ignore_eos=True, **scored))
    tables = [table for output in drain(engine) for table in (output.logprobs, output.prompt_logprobs) if table]
    assert len(tables) == 101
    assert max(table.token_ids.max() for table in tables) < 200


def test_bias_and_bad_words(engine: EngineCore) -> None:
    plain = greedy(engine, max_tokens=6, ignore_eos=True)
    biased = greedy(engine, max_tokens=4, logit_bias_ids=(77,), logit_bias_values=(100.0,))
    assert biased == [77] * 4
    without = greedy(engine, max_tokens=6, ignore_eos=True, bad_words_ids=((plain[0],),))
    assert plain[0] not in without
    pair = greedy(engine, max_tokens=6, ignore_eos=True, bad_words_ids=((plain[0], plain[1]),))
    assert pair[0] == plain[0]
    assert pair[1] != plain[1]
    assert plain[0] != plain[1]
    others = ((*plain[1:2], *plain[1:3]), (9, *plain[:2]), (*plain[:3], 9, plain[3]))  # alike only at their ends
    assert greedy(engine, max_tokens=6, ignore_eos=True, bad_words_ids=others) == plain
    word = tuple(plain[1:4])
    assert greedy(engine, max_tokens=6, ignore_eos=True, bad_words_ids=(word,))[3] != plain[3]


def test_penalties_move_away_from_what_was_said(engine: EngineCore) -> None:
    biased = {"logit_bias_ids": tuple(range(100, 110)), "logit_bias_values": (60.0,) * 10, "max_tokens": 10}
    assert len(set(greedy(engine, **biased))) < 10
    assert sorted(greedy(engine, **biased, presence_penalty=55.0)) == list(range(100, 110))
    assert_empty(engine)


def test_no_token_can_follow(engine: EngineCore) -> None:
    """Where every token is forbidden, the choice alone ends, with an error; a batch-mate does not notice."""
    plain = greedy(engine, max_tokens=5, ignore_eos=True)
    engine.add(request("mate", PROMPT, temperature=0.0, max_tokens=5, ignore_eos=True))
    engine.add(request("r", PROMPT, temperature=0.7, bad_words_ids=tuple((token,) for token in range(256))))
    outputs = drain(engine)
    assert [o.finish_reason for o in outputs if o.request_id == "r"] == [FinishReason.ERROR]
    assert ids_of(outputs, "mate") == plain
    assert_empty(engine)


def test_refused_requests_leave_nothing_and_harm_nobody(engine: EngineCore) -> None:
    """Ids outside the vocabulary, in prompts or stop lists, have ended whole engines elsewhere."""
    plain = greedy(engine, max_tokens=6, ignore_eos=True)
    engine.add(request("mate", PROMPT, temperature=0.0, max_tokens=6, ignore_eos=True))
    outputs = engine.step()
    for bad in (
        request("bad", []),
        request("bad", [5, 256]),
        request("bad", [2**32 - 1]),
        request("bad", range(2, 200), stop_token_ids=(10**7,)),
        request("bad", np.zeros(engine.limits.max_model_len)),
        request("bad", PROMPT, temperature=math.nan),
    ):
        with pytest.raises(RequestRefused):
            engine.add(bad)
    engine.add(request("guided", PROMPT, guide_kind="regex", guide="("))  # known to be bad only a moment later
    outputs += drain(engine)
    assert ids_of(outputs, "mate") == plain
    assert [o.finish_reason for o in outputs if o.request_id != "mate"] == [FinishReason.GUIDE_FAILED]
    assert_empty(engine)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort(engine: EngineCore, steps: int) -> None:
    engine.add(request("r", range(2, 200), n=2, max_tokens=50, ignore_eos=True))
    outputs = [output for _ in range(steps) for output in engine.step()]
    engine.abort("nobody")
    engine.abort("r", 7)
    engine.abort("r", 1)
    engine.abort("r", 1)
    engine.abort("r")
    outputs += drain(engine)
    assert finals(outputs) == [FinishReason.ABORT] * 2
    assert_empty(engine)


def test_abort_after_the_end_gives_no_second_final_output(engine: EngineCore) -> None:
    engine.add(request("r", PROMPT, max_tokens=1))
    outputs = engine.step()
    engine.abort("r")
    assert finals(outputs + drain(engine)) == [FinishReason.LENGTH]


def test_higher_attempt_replaces_silently(engine: EngineCore) -> None:
    one = request("r", PROMPT, temperature=0.0, max_tokens=6, ignore_eos=True)
    plain = run_alone(engine, one)
    engine.add(EngineRequest("r", 2, one.sampling, one.prompts))
    engine.step()
    engine.abort("r")
    engine.add(EngineRequest("r", 3, one.sampling, one.prompts))
    engine.add(EngineRequest("r", 2, one.sampling, one.prompts))
    outputs = drain(engine)
    assert {output.attempt for output in outputs} == {3}
    assert ids_of(outputs, "r") == plain
    assert_empty(engine)


@pytest.mark.parametrize("split", [1, 5, 11])
def test_resume_continues_the_same_output(model_dir: Path, split: int) -> None:
    sampling = SamplingParams(
        n=2,
        max_tokens=12,
        seed=5,
        ignore_eos=True,
        presence_penalty=1.0,
        repetition_penalty=1.3,
        min_tokens=9,
        top_p=0.95,
    )
    prompt = np.array(PROMPT, np.uint32)
    first = make_engine(model_dir, deterministic=True)
    first.add(EngineRequest("r", 1, sampling, (prompt,)))
    outputs = drain(first)
    whole = [ids_of(outputs, "r", choice) for choice in range(2)]
    assert whole[0] != whole[1]
    second = make_engine(model_dir, deterministic=True)
    so_far = (np.array(whole[0][:split], np.uint32), np.array(whole[1], np.uint32))
    second.add(EngineRequest("r", 2, sampling, (prompt,), so_far, (FinishReason.RUNNING, FinishReason.LENGTH)))
    outputs = drain(second)
    assert ids_of(outputs, "r", 0) == whole[0][split:]
    assert {output.choice for output in outputs} == {0}
    assert_empty(second)


def test_resume_of_a_complete_output_ends_at_once(engine: EngineCore) -> None:
    sampling = SamplingParams(max_tokens=3)
    engine.add(EngineRequest("r", 2, sampling, (np.array(PROMPT, np.uint32),), (np.array([5, 6, 7], np.uint32),)))
    assert engine.has_work()
    assert [(o.token_ids, o.finish_reason) for o in drain(engine)] == [((), FinishReason.LENGTH)]
    assert_empty(engine)


def test_cached_tokens_are_reported_once(engine: EngineCore) -> None:
    engine.add(request("first", range(2, 102), max_tokens=3, ignore_eos=True))
    assert {output.num_cached_tokens for output in drain(engine)} == {0}
    engine.add(request("second", range(2, 102), max_tokens=3, ignore_eos=True))
    assert [output.num_cached_tokens for output in drain(engine)] == [96, 0, 0]
    assert engine.stats.num_cached_tokens == 96
    assert engine.stats.num_prompt_tokens == 104


def test_choices_share_their_prompt_even_without_prefix_caching(model_dir: Path) -> None:
    engine = make_engine(model_dir, prefix_caching=False)
    for name in ("a", "b"):
        engine.add(request(name, range(2, 102), n=4, max_tokens=2, ignore_eos=True, temperature=0.0))
        outputs = drain(engine)
        assert len({tuple(ids_of(outputs, name, choice)) for choice in range(4)}) == 1
    assert engine.stats.num_prompt_tokens == 2 * (100 + 3 * 4)


def test_logprobs_of_output_and_prompt(engine: EngineCore) -> None:
    engine.add(
        request("r", PROMPT, temperature=0.0, max_tokens=4, num_logprobs=3, num_prompt_logprobs=2, ignore_eos=True)
    )
    outputs = drain(engine)
    ids = ids_of(outputs, "r")
    with torch.inference_mode():
        expected = reference_model("llama3")(torch.tensor([PROMPT + ids])).logits[0].log_softmax(-1).numpy()
    for i, output in enumerate(outputs):
        assert output.logprobs is not None
        assert output.logprobs.token_ids.shape == (1, 4)
        assert output.logprobs.token_ids[0, 0] == output.logprobs.token_ids[0, 1] == ids[i]
        where = output.logprobs.token_ids[0].astype(int)
        np.testing.assert_allclose(output.logprobs.logprobs[0], expected[len(PROMPT) - 1 + i][where], atol=1e-3)
    scored = outputs[0].prompt_logprobs
    assert scored is not None
    assert scored.token_ids.shape == (len(PROMPT) - 1, 3)
    assert scored.token_ids[:, 0].tolist() == PROMPT[1:]
    np.testing.assert_allclose(scored.logprobs[:, 0], expected[range(len(PROMPT) - 1), PROMPT[1:]], atol=1e-3)
    assert all(output.prompt_logprobs is None for output in outputs[1:])
    assert_empty(engine)


def test_scoring_a_prompt_without_output(model_dir: Path) -> None:
    """max_tokens 0 with echo scores a prompt; in chunks, and whatever the prefix cache holds."""
    engine = make_engine(model_dir, max_num_batched_tokens=16)
    one = request("r", PROMPT, max_tokens=0, num_prompt_logprobs=0)
    for _ in range(2):
        engine.add(one)
        (output,) = drain(engine)
        assert (output.token_ids, output.finish_reason) == ((), FinishReason.LENGTH)
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs.logprobs.shape == (len(PROMPT) - 1, 1)
    assert_empty(engine)


def test_preemption_changes_no_ids(model_dir: Path) -> None:
    roomy = make_engine(model_dir, deterministic=True)
    tight = make_engine(model_dir, deterministic=True, kv_cache_tokens=512, block_size=16)
    requests = [request(f"r{i}", range(2 + i, 90 + i), max_tokens=60, seed=i, ignore_eos=True) for i in range(6)]
    expected = [run_alone(roomy, one) for one in requests]
    for one in requests:
        tight.add(one)
    outputs = drain(tight)
    assert tight.stats.num_preemptions > 0
    assert [ids_of(outputs, one.request_id) for one in requests] == expected


def test_deterministic_mode_needs_float32(model_dir: Path) -> None:
    from tokservice.wire.errors import StartupError

    with pytest.raises(StartupError, match="deterministic"):
        make_engine(model_dir, deterministic=True, weight_format="int8")


def test_min_tokens_hold_back_stop_tokens_too(engine: EngineCore) -> None:
    plain = greedy(engine, max_tokens=12, ignore_eos=True)
    stop = plain[2]
    ids = greedy(engine, max_tokens=30, ignore_eos=True, stop_token_ids=(stop,), min_tokens=6)
    assert ids[:2] == plain[:2]
    assert stop not in ids[:6]


def test_biases_of_100_forbid_and_demand(engine: EngineCore) -> None:
    plain = greedy(engine, max_tokens=8, ignore_eos=True)
    forbidden = tuple(set(plain))
    ids = greedy(engine, max_tokens=8, ignore_eos=True, logit_bias_ids=forbidden, logit_bias_values=(-100.0,) * 8)
    assert not set(ids) & set(forbidden)
    one = request("r", PROMPT, max_tokens=8, temperature=1.5, logit_bias_ids=(9,), logit_bias_values=(100.0,))
    assert run_alone(engine, one) == [9] * 8


def test_the_urgent_run_first(model_dir: Path) -> None:
    engine = make_engine(model_dir, max_num_seqs=1)
    for name, priority in (("running", 0), ("patient", 5), ("ordinary", 0), ("urgent", -5)):
        engine.add(request(name, PROMPT, max_tokens=2, ignore_eos=True, priority=priority))
        if name == "running":
            engine.step()
    order = list(dict.fromkeys(output.request_id for output in drain(engine)))
    assert order == ["running", "urgent", "ordinary", "patient"]


@pytest.mark.parametrize(
    "penalties",
    [{"repetition_penalty": 1.8}, {"presence_penalty": 8.0}, {"frequency_penalty": 8.0}],
    ids=lambda value: next(iter(value)),
)
@pytest.mark.parametrize("kv_cache_tokens", [4096, 112])
def test_penalties_count_what_was_said_before_a_death_or_a_preemption(
    model_dir: Path, penalties: dict[str, float], kv_cache_tokens: int
) -> None:
    """Counted from the continuation on, a penalty forgets the output so far: the text repeats itself again."""
    likely = {"logit_bias_ids": tuple(range(100, 130)), "logit_bias_values": (20.0,) * 30}
    one = request("r", PROMPT, temperature=0.0, max_tokens=24, **likely, **penalties)
    whole = run_alone(make_engine(model_dir, deterministic=True), one)
    assert len(set(whole[:12])) > 6  # else there is nothing to forget
    engine = make_engine(model_dir, deterministic=True, block_size=16, kv_cache_tokens=kv_cache_tokens)
    engine.add(request("older", range(2, 44), max_tokens=60, ignore_eos=True, priority=-1))
    journal = (np.array(whole[:12], np.uint32),)
    engine.add(EngineRequest("r", 2, one.sampling, one.prompts, journal))
    assert ids_of(drain(engine), "r") == whole[12:]
    assert (engine.stats.num_preemptions > 0) == (kv_cache_tokens < 4096)


def test_repetition_penalty_counts_the_prompt(engine: EngineCore) -> None:
    biased = {"logit_bias_ids": (50, 51), "logit_bias_values": (60.0, 59.0), "max_tokens": 1, "temperature": 0.0}
    assert run_alone(engine, request("r", [40, 50, 41], **biased)) == [50]
    assert run_alone(engine, request("r", [40, 50, 41], **biased, repetition_penalty=2.0)) == [51]


def test_prompt_logprobs_are_whole_whatever_is_cached_or_preempted(model_dir: Path) -> None:
    """Cached prompt tokens have no logits: a prompt that is found in the cache was scored in part, or not at all."""
    prompt = [(7 * i) % 250 + 2 for i in range(100)]
    with torch.inference_mode():
        expected = reference_model("llama3")(torch.tensor([prompt])).logits[0].log_softmax(-1).numpy()
    engine = make_engine(model_dir, block_size=16, kv_cache_tokens=256, max_num_batched_tokens=40)
    run_alone(engine, request("r", prompt, max_tokens=2))
    assert engine.stats.num_cached_tokens == 0
    engine.add(request("older", range(2, 90), max_tokens=150, ignore_eos=True, priority=-1))
    engine.add(request("scored", prompt, max_tokens=60, n=2, num_prompt_logprobs=1, ignore_eos=True))
    firsts = [output for output in drain(engine) if output.prompt_logprobs is not None]
    assert sorted(output.choice for output in firsts) == [0, 1]
    for output in firsts:
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs.token_ids.shape == (99, 2)
        np.testing.assert_allclose(output.prompt_logprobs.logprobs[:, 0], expected[range(99), prompt[1:]], atol=1e-3)
    assert engine.stats.num_preemptions > 0
    engine.add(request("unscored", prompt, max_tokens=1))
    assert [output.num_cached_tokens for output in drain(engine)] == [96]


def test_choices_of_one_prompt_hold_its_blocks_once(model_dir: Path) -> None:
    engine = make_engine(model_dir, block_size=16)
    engine.add(request("r", range(2, 98), n=8, max_tokens=3, ignore_eos=True))
    while len(engine.step()) < 8:
        pass
    assert engine.stats.kv_cache_used_tokens == 96 + 8 * 16
