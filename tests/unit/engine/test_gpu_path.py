"""The GPU's way through a step, as far as a CPU can tell: its numbers, its padding, and that it never waits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.core import EngineRequest
from engine.model_files import read_json
from engine.torch_core import attention_cuda
from engine.torch_core import runner as runner_module
from engine.torch_core.attention_cuda import FlashAttention, GatherAttention, PagedAttention, paged_attention
from engine.torch_core.batch import build_batch
from engine.torch_core.decode_graphs import DecodeGraphs
from engine.torch_core.engine import TorchEngine
from engine.torch_core.guide import GuideMaker
from engine.torch_core.memory_profile import heaviest_steps, room_for_cache
from engine.torch_core.model import Model
from engine.torch_core.model_spec import ModelSpec, read_spec
from engine.torch_core.request import Sequence, sequences_of
from engine.torch_core.runner import Runner
from engine.torch_core.sampler import Sampler
from engine.torch_core.scheduler import Chunk
from engine.torch_core.transfer import Download, upload
from engine.torch_core.weights import Checkpoint
from tests.helpers.gpu_attention import arrange_as_on_a_gpu, flash_attn_varlen_func, gpu_attention
from tests.helpers.no_waiting import DEVICE, OnTheDeviceAlone, WouldWait, no_waiting
from tests.helpers.tiny_models import VOCAB_SIZE, drain, ids_of, make_engine, request, run_alone, save_tiny_model
from tokservice.runtime.config import from_dict
from tokservice.wire.errors import StartupError
from tokservice.wire.messages import SamplingParams

BLOCK_SIZE = 8
CPU = torch.device("cpu")
DEFAULT = SamplingParams()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def spec(model_dir: Path) -> ModelSpec:
    return read_spec(read_json(model_dir, "config.json"))


def load(model_dir: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype = torch.float32) -> Model:
    return Model(spec, Checkpoint(model_dir), weight_format="plain", device=device, dtype=dtype, max_len=512)


def sequence(length: int, blocks: list[int], sampling: SamplingParams = DEFAULT, arrival: int = 0) -> Sequence:
    prompt = np.random.default_rng(length).integers(2, VOCAB_SIZE, length).astype(np.uint32)
    (one,) = sequences_of(EngineRequest(f"r{arrival}", 1, sampling, (prompt,)), 512, (1,), arrival)
    one.block_table = blocks
    return one


@pytest.mark.parametrize("kind", ["gather", "flash"])
def test_padded_and_overlapping_steps_give_the_same_ids(model_dir: Path, kind: str) -> None:
    """Buckets of rows and widths, the spare block, ids that stay on the device: all of it at once."""
    rng = np.random.default_rng(5)
    requests = [
        request(f"r{i}", rng.integers(2, VOCAB_SIZE, length), temperature=0.0, max_tokens=14 + 3 * i)
        for i, length in enumerate((1, 30, 31, 33, 64, 100, 200))
    ]
    expected, engine = make_engine(model_dir), make_engine(model_dir, kv_cache_tokens=288)
    arrange_as_on_a_gpu(engine, kind)
    for one in requests:
        expected.add(one)
        engine.add(one)
    wanted, got = drain(expected), drain(engine)
    for one in requests:
        assert ids_of(got, one.request_id) == ids_of(wanted, one.request_id)
    assert engine.stats.num_preemptions > 0


@pytest.mark.parametrize("kind", ["gather", "flash"])
def test_what_overflowed_in_one_request_is_not_read_by_the_next(model_dir: Path, kind: str) -> None:
    """NaN left in a freed block ended whoever got that block, in the half precision that GPUs compute in."""
    one = request("r", range(2, 92), temperature=0.0, max_tokens=20, ignore_eos=True)
    engine: Any = make_engine(model_dir, max_num_batched_tokens=40)
    arrange_as_on_a_gpu(engine, kind)
    cache = engine._runner.attention._cache  # the last block is nobody's
    cache[:, :, :-1] = torch.nan
    assert run_alone(engine, one) == run_alone(make_engine(model_dir), one)


def test_gathering_in_portions(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows of long contexts, copied at once, would not fit beside the cache."""
    sequences = [sequence(60 + i, list(range(9 * i, 9 * i + 9))) for i in range(5)]
    batch = build_batch([Chunk(one, one.num_tokens - 1, 1) for one in sequences], BLOCK_SIZE, 1)
    rng = torch.Generator().manual_seed(0)
    rows = [torch.randn(5, heads, spec.head_dim, generator=rng) for heads in (spec.num_heads, 2, 2)]
    attention = gpu_attention("gather", spec, 45, BLOCK_SIZE, 512)
    attention.begin(batch)
    whole = attention(0, *rows)
    monkeypatch.setattr(attention_cuda, "GATHERED_TOKENS", 2 * 16 * BLOCK_SIZE)
    assert torch.equal(attention(0, *rows), whole)


def test_a_long_context_among_short_ones_is_not_padded_to_it(spec: ModelSpec) -> None:
    """In a graph every row is as wide as the widest, so 63 short ones beside a long one would be 64 long ones."""
    long, *short = [sequence(length, [0] * 64) for length in (500, 3, 4, 5, 6, 7)]
    chunks = [Chunk(one, one.num_tokens - 1, 1) for one in (long, *short)]
    gather, flash = (gpu_attention(kind, spec, 64, BLOCK_SIZE, 512) for kind in ("gather", "flash"))
    assert gather.graph_width(build_batch(chunks, BLOCK_SIZE, 1)) == 0
    assert gather.graph_width(build_batch(chunks[1:], BLOCK_SIZE, 1)) == 1
    assert flash.graph_width(build_batch(chunks[1:], BLOCK_SIZE, 1)) == 64


@pytest.mark.parametrize(
    ("installed", "block_size", "dtype", "expected"),
    [
        (True, 256, torch.bfloat16, FlashAttention),
        (True, 512, torch.float16, FlashAttention),
        (True, 32, torch.bfloat16, GatherAttention),
        (True, 256, torch.float32, GatherAttention),
        (False, 256, torch.bfloat16, GatherAttention),
    ],
)
def test_flash_attn_is_used_where_it_fits(
    monkeypatch: pytest.MonkeyPatch,
    spec: ModelSpec,
    installed: bool,
    block_size: int,
    dtype: torch.dtype,
    expected: type[PagedAttention],
) -> None:
    module: Any = ModuleType("flash_attn")
    module.flash_attn_varlen_func = lambda *args, **kwargs: None
    monkeypatch.setitem(sys.modules, "flash_attn", module if installed else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert type(paged_attention(spec, 2, block_size, CPU, dtype, 512)) is expected


GIB = 2**30


@pytest.mark.parametrize(
    ("dtype", "kv_cache_tokens", "attention"),
    [("float32", 1024, GatherAttention), ("float32", 0, GatherAttention), ("bfloat16", 0, FlashAttention)],
)
def test_the_loader_for_a_gpu(
    model_dir: Path,
    spec: ModelSpec,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    kv_cache_tokens: int,
    attention: type[PagedAttention],
) -> None:
    """From the profile of memory to the recorded graphs, on a CPU that answers for a GPU of 1 GiB."""
    module: Any = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    answers: dict[str, Any] = {
        "get_device_capability": (9, 0),
        "mem_get_info": (GIB - 100 * 2**20, GIB),
        "memory_allocated": 90 * 2**20,
        "max_memory_allocated": 94 * 2**20,
        "graph_pool_handle": None,
    }
    for name in (*answers, "reset_peak_memory_stats", "synchronize", "empty_cache", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: answers.get(name))
    recorded = []
    monkeypatch.setattr(DecodeGraphs, "_capture", lambda self, bucket: recorded.append((bucket.num_rows, bucket.width)))
    settings = {"kv_cache_tokens": kv_cache_tokens, "max_num_seqs": 5, "max_num_batched_tokens": 300}
    config = from_dict({"engine": settings, "model": {"dtype": dtype}})
    runner = runner_module._load_cuda(config, spec, Checkpoint(model_dir), CPU, 512, print)
    assert type(runner.attention) is attention
    assert runner.overlaps
    assert recorded == ([(1, 2), (2, 2), (4, 2), (8, 2)] if attention is FlashAttention else [])
    size = PagedAttention.bytes_per_token(spec, getattr(torch, dtype)) * 256
    expected = kv_cache_tokens // 256 or (int(GIB * 0.9) - 104 * 2**20) // size
    assert runner.num_blocks == expected
    plain: Any = make_engine(model_dir)
    engine = TorchEngine(config.engine, runner, plain.limits, GuideMaker(model_dir, VOCAB_SIZE, (), 0), VOCAB_SIZE)
    requests = [request(f"r{i}", range(2, 4 + 50 * i), temperature=0.0, max_tokens=20) for i in range(6)]
    for one in requests:
        engine.add(one)
    outputs = drain(engine)
    for one in requests:
        expected_ids = run_alone(plain, one)
        if dtype == "float32":
            assert ids_of(outputs, one.request_id) == expected_ids


def test_a_gpu_that_is_not_there(model_dir: Path) -> None:
    count = torch.cuda.device_count()
    with pytest.raises(StartupError, match=f"cuda:{count} is not usable"):
        make_engine(model_dir, device=f"cuda:{count}")


DEMANDING = (
    SamplingParams(temperature=0.0),
    SamplingParams(top_p=0.9, num_logprobs=3),
    SamplingParams(top_k=7, min_p=0.01, presence_penalty=0.3, repetition_penalty=1.2, num_logprobs=0),
    SamplingParams(min_tokens=5, stop_token_ids=(3, 4), bad_words_ids=((5,), (6, 7))),
    SamplingParams(logit_bias_ids=(8, 9), logit_bias_values=(1.0, -2.0), frequency_penalty=0.2, temperature=0.0),
    SamplingParams(guide_kind="regex", guide="a*"),
)


class _AnyToken:
    """A guide that allows everything."""

    def allowed(self) -> Any:
        return np.ones(VOCAB_SIZE, np.bool_)

    def accept(self, token: int) -> None:
        pass


def no_kernel(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(query)


@pytest.fixture(params=["gather", "flash"])
def runner(request: pytest.FixtureRequest, model_dir: Path, spec: ModelSpec) -> Runner:
    """A whole GPU runner in bfloat16 on a device without values."""
    dtype = torch.bfloat16
    model = load(model_dir, spec, DEVICE, dtype)
    attention: PagedAttention = (
        GatherAttention(spec, 64, BLOCK_SIZE, DEVICE, dtype)
        if request.param == "gather"
        else FlashAttention(spec, 64, BLOCK_SIZE, DEVICE, dtype, kernel=no_kernel, max_len=256)
    )
    return Runner(
        model=model,
        attention=attention,
        recorded=DecodeGraphs(model, attention, record=False),
        device=DEVICE,
        num_blocks=64,
        block_size=BLOCK_SIZE,
        max_model_len=256,
        max_lookup_tokens=1,
        max_batched_tokens=512,
        overlaps=True,
    )


@torch.inference_mode()
def test_no_step_waits_for_the_device(runner: Runner) -> None:
    """A hidden wait (a list as an index, a number read back) ends the overlap, and breaks a graph's recording."""
    sampler = Sampler(VOCAB_SIZE, DEVICE)
    sequences = [
        sequence(20 + i, list(range(8 * i, 8 * i + 8)), sampling, arrival=i) for i, sampling in enumerate(DEMANDING)
    ]
    guide: Any = _AnyToken()
    sampler.set_guide(sequences[-1], guide)
    sampled = None
    for step in range(4):
        # One prefill in two chunks, one at once, then decodes alone: the last two steps are such as a graph records.
        chunks = [Chunk(one, one.num_tokens - 1, 1) for one in sequences]
        if step < 2:
            chunks[0] = Chunk(sequences[0], 10 * step, 10)
            chunks[1] = Chunk(sequences[1], 0, sequences[1].num_tokens)
        batch = build_batch(chunks, BLOCK_SIZE, 1)
        with no_waiting():
            hidden = runner.forward(batch, sampled)
            rows = upload([int(row[-1]) for row in batch.row_of], DEVICE)
            sampled = sampler.sample(runner.model.logits(hidden.index_select(0, rows)), sequences)
        for row, one in enumerate(sequences):
            if step:
                one.arrive(10 + step)
                with no_waiting():
                    sampler.accept(one, 10 + step)
            one.expect(row)
    assert set(runner.recorded._buckets) == {(8, runner.attention.fixed_width or 4)}  # type: ignore[union-attr]


@torch.inference_mode()
def test_what_a_graph_records_stays_on_the_device(runner: Runner) -> None:
    graphs: Any = runner.recorded
    bucket = graphs._bucket(8, runner.attention.fixed_width or 4)  # type: ignore[union-attr]
    with no_waiting(), OnTheDeviceAlone():
        hidden = graphs._compute(bucket)
    assert hidden.shape == (8, runner.model.spec.hidden_size)
    with pytest.raises(WouldWait), OnTheDeviceAlone():
        upload([1, 2], DEVICE)


@pytest.mark.parametrize(
    "wait",
    [
        lambda t: t.max().item(),
        lambda t: t[t > 0],
        lambda t: t[[0, 1]],
        lambda t: t[torch.tensor([0, 1])],
        lambda t: t.cpu(),
        lambda t: bool(t.any()),
        lambda t: t.nonzero(),
        lambda t: torch.tensor([1.0, 2.0], device=t.device),
        lambda t: torch.ones(3).to(t.device),
        lambda t: t.copy_(torch.ones(3)),
        lambda t: t.__setitem__([0, 1], 0.0),
    ],
)
def test_the_guard_sees_every_kind_of_wait(wait: Any) -> None:
    with pytest.raises((WouldWait, NotImplementedError, RuntimeError)), no_waiting():
        wait(torch.ones(3, device=DEVICE))


def test_downloads_hold_the_values_of_their_moment() -> None:
    tensor = torch.arange(3)
    assert Download(tensor, tensor > 1).read()[0].tolist() == [0, 1, 2]


def test_room_for_the_cache() -> None:
    """Whatever others use on the GPU is not ours, and a step's peak stays free."""
    gib = 2**30
    assert room_for_cache(total=80 * gib, free=60 * gib, step_peak=2 * gib, utilization=0.9) == (72 - 20 - 2) * gib
    assert room_for_cache(total=8 * gib, free=1 * gib, step_peak=2 * gib, utilization=0.9) == 0


@pytest.mark.parametrize("kind", ["gather", "flash"])
def test_the_profile_computes_the_largest_steps(
    model_dir: Path, spec: ModelSpec, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(model_dir, spec, CPU)
    shapes = []
    forward, logits = model.forward, model.logits

    def noted_forward(token_ids: Tensor, positions: Tensor, attention: Any) -> Tensor:
        shapes.append((len(token_ids), int(positions.max())))
        return forward(token_ids, positions, attention)

    def noted_logits(hidden: Tensor) -> Tensor:
        shapes.append((len(hidden), 0))
        return logits(hidden)

    monkeypatch.setattr(model, "forward", noted_forward)
    monkeypatch.setattr(model, "logits", noted_logits)
    attention = gpu_attention(kind, spec, 1, BLOCK_SIZE, 100)
    heaviest_steps(model, attention, max_tokens=250, max_seqs=6, max_len=100)
    assert shapes == [(250, 99), (6, 0), (6, 99), (6, 0)]


def test_gpu_check_says_that_there_is_no_gpu() -> None:
    """A check that passes where it checked nothing."""
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = subprocess.run([sys.executable, "-m", "scripts.gpu_check"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert "no CUDA device" in result.stdout


def test_gpu_check_runs_to_its_end(model_dir: Path) -> None:
    """A typing error in it would show on the first GPU that it meets, whose minutes are dear."""
    command = [sys.executable, "-m", "scripts.gpu_check", "--device", "cpu", "--quick", "--model-dir", str(model_dir)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    record = json.loads(result.stdout.splitlines()[-1])
    assert record["ok"]
    assert len(record["checks"]) == 6
    assert [(rate["tokens"], rate["overlap"]) for rate in record["output_tokens_per_s"]] == [
        ("greedy", True),
        ("greedy", True),
        ("greedy", False),
        ("sampled", True),
    ]
    assert "output tokens/s" in result.stdout
