"""Correctness and throughput of the engine on a CUDA device, within five minutes.

    python -m scripts.gpu_check

Greedy ids in float32 must equal those of the CPU engine; in bfloat16 the distribution of the next token must stay
close (mean KL divergence below 0.02). Then output tokens per second at several concurrencies. Prints a table, then
one JSON line. Exit code: 0 if all is well, 1 if a check failed, 2 without a CUDA device.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.core import EngineCore, EngineRequest
from engine.load import build_core
from tokservice.models.default_model import ensure_default_model
from tokservice.runtime.config import from_dict
from tokservice.wire.messages import SamplingParams

MAX_KL = 0.02
TOP = 64  # logprobs compared for each token


def main() -> int:
    """Run everything."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was checked")
        return 2
    model_dir = ensure_default_model()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1000, 20000, length).astype(np.uint32) for length in (1, 7, 33, 64, 150, 400, 700)]
    on_cpu = _engine(model_dir, "cpu", "float32", weight_format="float32")
    exact = _engine(model_dir, "cuda", "float32")
    expected, got = _greedy(on_cpu, prompts), _greedy(exact, prompts)
    same = [a == b for a, b in zip(expected, got, strict=True)]
    print(f"float32: greedy ids equal the CPU's for {sum(same)} of {len(same)} prompts")
    del exact
    torch.cuda.empty_cache()
    half = _engine(model_dir, "cuda", "bfloat16")
    divergence = _kl(_scores(on_cpu, prompts[-1]), _scores(half, prompts[-1]))
    print(f"bfloat16: mean KL divergence of the next token {divergence:.5f} (limit {MAX_KL})")
    rates = {}
    for concurrency in (1, 8, 32, 128):
        _rate(half, concurrency, 8)  # records the graphs
        rates[concurrency] = _rate(half, concurrency, 128)
        print(f"bfloat16, concurrency {concurrency:3d}: {rates[concurrency]:8.0f} output tokens/s")
    ok = all(same) and divergence < MAX_KL
    name = torch.cuda.get_device_name()
    print(json.dumps({"device": name, "ok": ok, "equal": same, "kl": divergence, "output_tokens_per_s": rates}))
    return 0 if ok else 1


def _engine(model_dir: Path, device: str, dtype: str, **settings: Any) -> EngineCore:
    engine = {
        "device": device,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
        "kv_cache_tokens": 131072,
    } | settings
    return build_core(from_dict({"engine": engine, "model": {"dtype": dtype}}), model_dir)


def _greedy(core: EngineCore, prompts: list[Any]) -> list[list[int]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        core.add(EngineRequest(str(index), 1, sampling, (prompt,)))
    ids: list[list[int]] = [[] for _ in prompts]
    while core.has_work():
        for output in core.step():
            ids[int(output.request_id)] += output.token_ids
    return ids


def _scores(core: EngineCore, prompt: Any) -> Any:
    """Logprobs of the most likely tokens at each position of a prompt."""
    core.add(EngineRequest("scores", 1, SamplingParams(max_tokens=0, num_prompt_logprobs=TOP), (prompt,)))
    outputs = []
    while core.has_work():
        outputs += core.step()
    return outputs[0].prompt_logprobs


def _kl(exact: Any, approximate: Any) -> float:
    """Mean over positions of the divergence over those top tokens that both know."""
    total = 0.0
    for ids, values, other_ids, other_values in zip(
        exact.token_ids, exact.logprobs, approximate.token_ids, approximate.logprobs, strict=True
    ):
        other = dict(zip(other_ids.tolist(), other_values.tolist(), strict=True))
        pairs = {i: (p, other[i]) for i, p in zip(ids.tolist(), values.tolist(), strict=True) if i in other}
        total += sum(np.exp(p) * (p - q) for p, q in pairs.values())
    return total / len(exact.token_ids)


def _rate(core: EngineCore, concurrency: int, output: int) -> float:
    rng = np.random.default_rng(time.monotonic_ns())
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    for index in range(concurrency):
        prompt = rng.integers(1000, 20000, 256).astype(np.uint32)
        core.add(EngineRequest(str(index), 1, sampling, (prompt,)))
    start = time.perf_counter()
    while core.has_work():
        core.step()
    return concurrency * output / (time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
