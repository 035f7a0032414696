"""Correctness and throughput of the engine on a CUDA device, within five minutes.

    python -m scripts.gpu_check                          everything, on the default model
    python -m scripts.gpu_check --device cpu --quick     the program itself, where there is no GPU

In float32 the ids must equal those of the CPU engine, greedy and sampled, and whether or not steps overlap. In
bfloat16 the distribution of the next token must stay close to the CPU's float32 (mean KL divergence below 0.02), over
a prompt, which is prefilled, and over an output, which is decoded. Then output tokens per second at several
concurrencies, greedy and with top_p, with and without overlap. Prints a table, then one JSON line. Exit code: 0 if all
is well, 1 if a check failed, 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.core import ChoiceOutput, EngineRequest, Logprobs, TokenIds
from engine.load import build_core
from tokservice.models.default_model import ensure_default_model
from tokservice.runtime.config import from_dict
from tokservice.wire.messages import SamplingParams

MAX_KL = 0.02
TOP = 64  # logprobs compared for each token
LENGTHS = (1, 7, 33, 64, 150, 257, 400, 700)
CONCURRENCIES = (1, 8, 32, 128)
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.3, "repetition_penalty": 1.1, "ignore_eos": True}


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cpu: to try this program itself")
    parser.add_argument("--model-dir", type=Path, help="default: the default model")
    parser.add_argument("--quick", action="store_true", help="few prompts, short outputs, low concurrencies")
    args = parser.parse_args()
    is_cuda = args.device.startswith("cuda")
    if is_cuda and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked")
        return 2
    start = time.perf_counter()
    model_dir = args.model_dir or ensure_default_model()
    check = _Check(model_dir, args.device, "bfloat16" if is_cuda else "auto", args.quick)
    record = _environment(args.device) | check.run()
    record["seconds"] = round(time.perf_counter() - start, 1)
    print(json.dumps(record))
    return 0 if record["ok"] else 1


class _Check:
    """One run over one model."""

    def __init__(self, model_dir: Path, device: str, half: str, quick: bool) -> None:
        self._model_dir = model_dir
        self._device = device
        self._half = half
        self._lengths = LENGTHS[:4] if quick else LENGTHS
        self._output = 8 if quick else 32
        self._prompt = 32 if quick else 256
        self._concurrencies = CONCURRENCIES[:2] if quick else CONCURRENCIES
        self._checks: list[dict[str, Any]] = []
        self._rates: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        """The record: every check and every rate."""
        on_cpu = self._engine("cpu", "float32", weight_format="float32")
        prompts = [_prompt(on_cpu, length, seed) for seed, length in enumerate(self._lengths)]
        self._compare_ids(on_cpu, prompts)
        _free_memory()
        half = self._engine(self._device, self._half, kv_cache_tokens=0, gpu_memory_utilization=0.5)
        attention = type(half._runner.attention).__name__
        print(f"{self._half}: {attention}, {half.limits.kv_cache_tokens} tokens of KV cache in half of the memory")
        self._compare_distributions(on_cpu, half, prompts[-1])
        self._measure(half)
        return {
            "attention": attention,
            "kv_cache_tokens": half.limits.kv_cache_tokens,
            "ok": all(check["ok"] for check in self._checks),
            "checks": self._checks,
            "output_tokens_per_s": self._rates,
        }

    def _compare_ids(self, on_cpu: Any, prompts: list[TokenIds]) -> None:
        exact = self._engine(self._device, "float32", **({"weight_format": "float32"} if self._device == "cpu" else {}))
        for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
            expected = _ids(_generate(on_cpu, prompts, self._output, sampling), len(prompts))
            for overlaps in (False, True):
                exact._runner.overlaps = overlaps
                got = _ids(_generate(exact, prompts, self._output, sampling), len(prompts))
                equal = sum(a == b for a, b in zip(expected, got, strict=True))
                label = f"float32, {name}, {'with' if overlaps else 'without'} overlap: prompts with the CPU's ids"
                self._note(label, equal, f"all {len(prompts)}", equal == len(prompts))

    def _compare_distributions(self, on_cpu: Any, half: Any, prompt: TokenIds) -> None:
        divergence = _kl(_scores(on_cpu, prompt), _scores(half, prompt))
        self._note(f"{self._half}, prefill: mean KL divergence of the next token", divergence, f"< {MAX_KL}")
        outputs = _generate(half, [prompt], self._output, GREEDY | {"num_logprobs": TOP})
        decoded = _joined([output.logprobs for output in outputs if output.logprobs is not None])
        whole = np.concatenate([prompt, np.array(_ids(outputs, 1)[0], np.uint32)])
        scored = _scores(on_cpu, whole)
        expected = Logprobs(scored.token_ids[len(prompt) - 1 :], scored.logprobs[len(prompt) - 1 :])
        divergence = _kl(expected, decoded)
        self._note(f"{self._half}, decode: mean KL divergence of the next token", divergence, f"< {MAX_KL}")

    def _measure(self, half: Any) -> None:
        cases: list[tuple[int, dict[str, Any], bool]] = [(count, GREEDY, True) for count in self._concurrencies]
        cases += [(self._concurrencies[-1], GREEDY, False), (self._concurrencies[-1], SAMPLED, True)]
        print(f"{'concurrency':>11} {'tokens':>8} {'overlap':>8} {'output tokens/s':>16}")
        for concurrency, sampling, overlaps in cases:
            half._runner.overlaps = overlaps
            self._rate(half, concurrency, 8, sampling)  # whatever is recorded or chosen the first time
            rate = self._rate(half, concurrency, 4 * self._output, sampling)
            name = "greedy" if sampling is GREEDY else "sampled"
            print(f"{concurrency:11d} {name:>8} {'on' if overlaps else 'off':>8} {rate:16.0f}")
            case = {"concurrency": concurrency, "tokens": name, "overlap": overlaps}
            self._rates.append(case | {"output_tokens_per_s": round(rate, 1)})

    def _rate(self, core: Any, concurrency: int, output: int, sampling: dict[str, Any]) -> float:
        """Output tokens per second, prefill included; the prompts are new each time, so that none is in the cache."""
        prompts = [_prompt(core, self._prompt, time.monotonic_ns()) for _ in range(concurrency)]
        start = time.perf_counter()
        _generate(core, prompts, output, sampling)
        return concurrency * output / (time.perf_counter() - start)

    def _note(self, name: str, value: float, limit: str, ok: bool | None = None) -> None:
        ok = value < MAX_KL if ok is None else ok
        self._checks.append({"check": name, "value": value, "limit": limit, "ok": ok})
        print(f"{'ok' if ok else 'FAILED':6} {name}: {value:.5g} ({limit})")

    def _engine(self, device: str, dtype: str, **settings: Any) -> Any:
        engine = {
            "device": device,
            "max_num_seqs": CONCURRENCIES[-1],
            "max_num_batched_tokens": 2048,
            "kv_cache_tokens": 65536,
        } | settings
        return build_core(from_dict({"engine": engine, "model": {"dtype": dtype}}), self._model_dir)


def _environment(device: str) -> dict[str, Any]:
    record: dict[str, Any] = {"device": "cpu", "torch": torch.__version__, "cuda": torch.version.cuda}
    if device.startswith("cuda"):
        record["device"] = torch.cuda.get_device_name(device)
        record["capability"] = torch.cuda.get_device_capability(device)
    record["flash_attn"] = importlib.util.find_spec("flash_attn") is not None
    print(", ".join(f"{key} {value}" for key, value in record.items()))
    return record


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _prompt(core: Any, length: int, seed: int) -> TokenIds:
    size = core.limits.vocab_size
    return np.random.default_rng(seed).integers(size // 50 + 2, size // 2, length).astype(np.uint32)


def _run(core: Any) -> list[ChoiceOutput]:
    outputs: list[ChoiceOutput] = []
    while core.has_work():
        outputs += core.step()
    return outputs


def _generate(core: Any, prompts: list[TokenIds], output: int, sampling: dict[str, Any]) -> list[ChoiceOutput]:
    for index, prompt in enumerate(prompts):
        core.add(EngineRequest(str(index), 1, SamplingParams(max_tokens=output, seed=index, **sampling), (prompt,)))
    return _run(core)


def _ids(outputs: list[ChoiceOutput], count: int) -> list[list[int]]:
    ids: list[list[int]] = [[] for _ in range(count)]
    for output in outputs:
        ids[int(output.request_id)] += output.token_ids
    return ids


def _scores(core: Any, prompt: TokenIds) -> Logprobs:
    """Logprobs of the most likely tokens at each position of a prompt but the first."""
    core.add(EngineRequest("scores", 1, SamplingParams(max_tokens=0, num_prompt_logprobs=TOP), (prompt,)))
    (scored,) = [output.prompt_logprobs for output in _run(core) if output.prompt_logprobs is not None]
    return scored


def _joined(rows: list[Logprobs]) -> Logprobs:
    return Logprobs(np.concatenate([row.token_ids for row in rows]), np.concatenate([row.logprobs for row in rows]))


def _kl(exact: Logprobs, approximate: Logprobs) -> float:
    """Mean over positions of the divergence over those top tokens that both know."""
    total = 0.0
    for ids, values, other_ids, other_values in zip(
        exact.token_ids, exact.logprobs, approximate.token_ids, approximate.logprobs, strict=True
    ):
        other = dict(zip(other_ids.tolist(), other_values.tolist(), strict=True))
        pairs = {i: (p, other[i]) for i, p in zip(ids.tolist(), values.tolist(), strict=True) if i in other}
        total += sum(np.exp(p) * (p - q) for p, q in pairs.values())
    return float(total / len(exact.token_ids))


if __name__ == "__main__":
    sys.exit(main())
