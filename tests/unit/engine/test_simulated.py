"""The simulated engine: its rule, its time, and how choices end."""

from __future__ import annotations

import numpy as np
import pytest

from engine.core import ChoiceOutput, EngineRequest, RequestRefused
from engine.simulated import SimulatedEngine
from tokservice.runtime.config import EngineConfig, SimulatedConfig
from tokservice.wire.messages import FinishReason, SamplingParams

VOCAB = 1000
EOS = 2


class FakeTime:
    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def make_engine(
    fake: FakeTime | None = None, *, step_ms: float = 0.0, rate: float = 0.0, **config: int
) -> SimulatedEngine:
    fake = fake or FakeTime()
    simulated = SimulatedConfig(step_ms=step_ms, prefill_tokens_per_s=rate)
    engine_config = EngineConfig(kind="simulated", **config)  # type: ignore[arg-type]
    return SimulatedEngine(engine_config, simulated, VOCAB, (EOS,), clock=fake.clock, sleep=fake.sleep)


def make_request(name: str = "r", prompt: int = 5, **sampling: object) -> EngineRequest:
    return EngineRequest(name, 1, SamplingParams(**sampling), (np.arange(prompt, dtype=np.uint32) % VOCAB,))  # type: ignore[arg-type]


def drain(engine: SimulatedEngine) -> list[ChoiceOutput]:
    outputs: list[ChoiceOutput] = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def ids(outputs: list[ChoiceOutput], choice: int = 0) -> list[int]:
    return [token for output in outputs if output.choice == choice for token in output.token_ids]


def test_ids_are_a_pure_function_within_the_plain_range() -> None:
    first, second = (drain_request(max_tokens=200, seed=7) for _ in range(2))
    assert first == second
    assert len(set(first)) > 50
    assert all(VOCAB // 8 <= token < VOCAB // 2 for token in first)


def drain_request(**sampling: object) -> list[int]:
    engine = make_engine()
    engine.add(make_request(**sampling))  # type: ignore[arg-type]
    return ids(drain(engine))


def test_seed_and_choice_matter_unless_greedy() -> None:
    assert drain_request(seed=1) != drain_request(seed=2)
    assert drain_request(seed=1, temperature=0.0) == drain_request(seed=2, temperature=0.0)
    engine = make_engine()
    engine.add(make_request(n=2))
    outputs = drain(engine)
    assert ids(outputs, 0) != ids(outputs, 1)


def test_resume_continues_where_the_earlier_attempt_stopped() -> None:
    whole = drain_request(max_tokens=10, seed=3)
    engine = make_engine()
    request = make_request(max_tokens=10, seed=3)
    engine.add(EngineRequest("r", 2, request.sampling, request.prompts, (np.array(whole[:4], dtype=np.uint32),)))
    outputs = drain(engine)
    assert ids(outputs) == whole[4:]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert {output.attempt for output in outputs} == {2}


def test_resume_of_a_complete_output_ends_at_once() -> None:
    engine = make_engine()
    request = make_request(max_tokens=2)
    engine.add(EngineRequest("r", 2, request.sampling, request.prompts, (np.array([200, 201], dtype=np.uint32),)))
    assert [(o.token_ids, o.finish_reason) for o in drain(engine)] == [((), FinishReason.LENGTH)]


def test_finished_choices_of_an_earlier_attempt_are_not_run() -> None:
    engine = make_engine()
    request = make_request(n=2, max_tokens=3)
    finished = (FinishReason.STOP, FinishReason.RUNNING)
    engine.add(EngineRequest("r", 2, request.sampling, request.prompts, (), finished))
    assert {output.choice for output in drain(engine)} == {1}


def test_forced_ids_and_stop() -> None:
    engine = make_engine()
    engine.add(make_request(logit_bias_ids=(300, 301, EOS), logit_bias_values=(100.0, 100.0, 100.0)))
    outputs = drain(engine)
    assert ids(outputs) == [300, 301, EOS]
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_stop_token_waits_for_min_tokens() -> None:
    plain = drain_request(max_tokens=8)
    assert drain_request(max_tokens=8, stop_token_ids=(plain[2],)) == plain[:3]
    later = drain_request(max_tokens=8, stop_token_ids=(plain[2],), min_tokens=8)
    assert len(later) == 8
    assert plain[2] not in later


def test_step_time_is_for_all_choices_together() -> None:
    fake = FakeTime()
    engine = make_engine(fake, step_ms=20.0)
    for name in "abc":
        engine.add(make_request(name, max_tokens=5))
    drain(engine)
    assert fake.now == pytest.approx(5 * 0.020)


def test_prefill_costs_time_and_never_stops_running_choices() -> None:
    fake = FakeTime()
    engine = make_engine(fake, step_ms=1.0, rate=1000.0, max_num_batched_tokens=100)
    engine.add(make_request("short", prompt=1, max_tokens=40))
    engine.step()
    engine.add(make_request("long", prompt=1000, max_tokens=1))
    gaps = []
    while engine.has_work():
        before = fake.now
        moved = {output.request_id for output in engine.step()}
        gaps.append(fake.now - before)
        assert "short" in moved or len(gaps) > 39
    assert max(gaps) == pytest.approx(0.101)
    assert sum(gaps) >= 1.0


def test_copies_share_the_prompt() -> None:
    fake = FakeTime()
    engine = make_engine(fake, rate=1000.0)
    engine.add(make_request(prompt=500, n=8, max_tokens=1))
    drain(engine)
    assert fake.now == pytest.approx(0.5)
    assert engine.stats.num_prompt_tokens == 500


def test_million_token_prompt_and_context_limit() -> None:
    engine = make_engine()
    length = engine.limits.max_model_len
    assert length == 1_048_576
    engine.add(make_request(prompt=length - 3, max_tokens=100))
    outputs = drain(engine)
    assert len(ids(outputs)) == 3
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    with pytest.raises(RequestRefused):
        engine.add(make_request(prompt=length))


def test_concurrency_limit_and_priority() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add(make_request("first", max_tokens=1))
    engine.add(make_request("late", max_tokens=1))
    engine.add(make_request("urgent", max_tokens=1, priority=-1))
    assert [output.request_id for output in drain(engine)] == ["urgent", "first", "late"]


@pytest.mark.parametrize("steps", [0, 1])
def test_abort_gives_exactly_one_final_output(steps: int) -> None:
    engine = make_engine()
    engine.add(make_request(n=2))
    for _ in range(steps):
        engine.step()
    engine.abort("unknown")
    engine.abort("r", 5)
    engine.abort("r", 1)
    engine.abort("r")
    engine.abort("r")
    final = [(output.choice, output.finish_reason) for output in drain(engine)]
    assert sorted(final) == [(0, FinishReason.ABORT), (1, FinishReason.ABORT)]
    assert engine.stats.num_running == engine.stats.num_waiting == 0


def test_higher_attempt_replaces_silently_and_lower_is_discarded() -> None:
    engine = make_engine()
    request = make_request(max_tokens=2)
    engine.add(EngineRequest("r", 2, request.sampling, request.prompts))
    engine.step()
    engine.abort("r")
    engine.add(EngineRequest("r", 3, request.sampling, request.prompts))
    engine.add(EngineRequest("r", 1, request.sampling, request.prompts))
    outputs = drain(engine)
    assert {output.attempt for output in outputs} == {3}
    assert len(ids(outputs)) == 2


def test_no_tokens_wanted() -> None:
    assert drain_request(max_tokens=0) == []


def test_logprobs_have_a_row_per_token() -> None:
    engine = make_engine()
    engine.add(make_request(num_logprobs=2, max_tokens=1))
    (output,) = drain(engine)
    assert output.logprobs is not None
    assert output.logprobs.token_ids.shape == output.logprobs.logprobs.shape == (1, 3)
    assert output.logprobs.token_ids[0, 0] == output.token_ids[0]


def test_twenty_thousand_requests_leave_nothing_behind() -> None:
    """A table that only grows would end a server after days."""
    engine = make_engine(max_num_seqs=256)
    for i in range(20_000):
        engine.add(make_request(f"r{i}", max_tokens=1))
        if i % 200 == 199:
            drain(engine)
    assert not engine._requests
    assert not engine._waiting
    assert not engine._running
    assert engine.stats.num_output_tokens == 20_000
