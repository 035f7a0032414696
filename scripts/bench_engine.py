"""Measures the engine core alone, beside transformers' generate and the memory-bandwidth limit.

    python scripts/bench_engine.py                       the whole table on the default model
    python scripts/bench_engine.py --concurrency 1 8     some sizes only
    python scripts/bench_engine.py --set engine.deterministic=true
    python scripts/bench_engine.py --quality             what the weight formats cost, instead

On a machine with other load set GOMP_SPINCOUNT=1000, as the engine process does for itself.
Prints a table for people, then one JSON line for programs. Prompts are random ids of ragged lengths around --prompt
(half to one and a half times), the same for both sides; every sequence gets exactly --output tokens. transformers
runs in float32 and in bfloat16, and the ratio is to the faster. Beside the rate stands the CPU time of each token,
which other load on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from engine.core import EngineCore, EngineRequest
from engine.load import build_core
from engine.torch_core.batch import build_batch
from engine.torch_core.kernels.layout import GROUP
from engine.torch_core.request import sequences_of
from engine.torch_core.scheduler import Chunk
from tokservice.models.default_model import ensure_default_model
from tokservice.runtime.config import Config, resolve
from tokservice.wire.errors import StartupError
from tokservice.wire.messages import SamplingParams

TEXT = (Path(__file__).parent.parent / "LICENSE").read_text()[:4000]  # English of some length that every checkout has
REFERENCE_DTYPES = ("float32", "bfloat16")
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, help="default: the default model")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=1, help="runs of each figure; the best counts, for both sides")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--no-latency", action="store_true", help="leave out the long prompt and the shared prefix")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    parser.add_argument("--quality", action="store_true", help="KL divergence of each weight format from float32")
    args = parser.parse_args()

    model_dir = args.model_dir or ensure_default_model()
    if args.quality:
        return _quality(model_dir)
    config = resolve(None, args.set)
    core = build_core(config, model_dir)
    _fill_cache(core)
    references = {} if args.no_transformers else {name: _reference(model_dir, name) for name in REFERENCE_DTYPES}
    rows = []
    for concurrency in args.concurrency:
        prompts = _prompts(concurrency, args.prompt, core.limits.vocab_size)
        row: dict[str, Any] = {"concurrency": concurrency}
        bandwidth = _copy_bandwidth()  # it changes with what else the host does: measured on both sides of the run
        runs = [_measure(_run_engine, core, prompts, args.output) for _ in range(args.repeat)]
        row["copy_bytes_per_s"] = max(bandwidth, _copy_bandwidth())
        row["engine"], row["engine_cpu_ms"] = max(runs)
        for name, reference in references.items():
            runs = [_measure(_run_reference, reference, prompts, args.output) for _ in range(args.repeat)]
            row[f"transformers_{name}"], row[f"transformers_{name}_cpu_ms"] = max(runs)
        if references:
            row["ratio"] = row["engine"] / max(row[f"transformers_{name}"] for name in references)
        rows.append(row)
        _print_row(row)
    result: dict[str, Any] = {"threads": torch.get_num_threads(), "settings": args.set, "output_tokens_per_s": rows}
    if 1 in args.concurrency and torch.get_default_device().type == "cpu":
        row = next(row for row in rows if row["concurrency"] == 1)
        result |= _bandwidth(config, model_dir, args.prompt + args.output / 2, row)
    if not args.no_latency:
        result |= _long_prompt(core) | _shared_prefix(core)
    print(json.dumps(result))
    return 0


def _fill_cache(core: EngineCore, length: int = 2000) -> None:
    """Write each of its blocks once: the system gives memory when it is first written, which takes longer than that."""
    length = min(length, core.limits.max_model_len - 1)
    for index in range(core.limits.kv_cache_tokens // length + 1):
        _add(core, f"f{index}", np.full(length, index + 1, np.uint32), 1)
        while core.has_work():
            core.step()


def _prompts(count: int, length: int, vocab_size: int) -> list[np.ndarray[tuple[int], np.dtype[np.uint32]]]:
    rng = np.random.default_rng(count)
    lengths = np.linspace(length // 2, length + length // 2, count).astype(int) if count > 1 else [length]
    return [rng.integers(vocab_size // 8, vocab_size // 2, size).astype(np.uint32) for size in rng.permutation(lengths)]


def _add(core: EngineCore, name: str, prompt: np.ndarray[tuple[int], np.dtype[np.uint32]], output: int) -> None:
    core.add(EngineRequest(name, 1, SamplingParams(max_tokens=output, **GREEDY), (prompt,)))  # type: ignore[arg-type]


def _measure(
    run: Callable[[Any, list[Any], int], None], side: Any, prompts: list[Any], output: int
) -> tuple[float, float]:
    """Output tokens per second, prefill included, and milliseconds of CPU for each."""
    start, cpu = time.perf_counter(), time.process_time()
    run(side, prompts, output)
    tokens = len(prompts) * output
    return tokens / (time.perf_counter() - start), (time.process_time() - cpu) / tokens * 1000


def _run_engine(core: EngineCore, prompts: list[Any], output: int) -> None:
    """Prompts never meet the cache of an earlier run."""
    salt = np.uint32(time.monotonic_ns() % 4096)
    for index, prompt in enumerate(prompts):
        _add(core, f"r{index}", (prompt + salt).astype(np.uint32), output)
    while core.has_work():
        core.step()


def _reference(model_dir: Path, dtype: str) -> Any:
    from _extras import transformers as library

    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    return library.AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()


def _run_reference(model: Any, prompts: list[Any], output: int) -> None:
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padded on the left, as generate wants it
        ids[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, longest - len(prompt) :] = 1
    with torch.inference_mode():
        model.generate(ids, attention_mask=mask, do_sample=False, min_new_tokens=output, max_new_tokens=output)


def _copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy, the best of five."""
    source, target = torch.ones(2**27), torch.empty(2**27)  # 512 MiB each
    times = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(times)


def _bandwidth(config: Config, model_dir: Path, context: float, row: dict[str, Any]) -> dict[str, Any]:
    """What one step must read at concurrency 1, over the bandwidth of a large copy."""
    shape = json.loads((model_dir / "config.json").read_text())
    hidden, kv_size = shape["hidden_size"], 2 * shape["num_key_value_heads"] * shape["head_dim"]
    attention = hidden * (2 * shape["num_attention_heads"] * shape["head_dim"] + kv_size)
    weights = shape["num_hidden_layers"] * (attention + 3 * hidden * shape["intermediate_size"])
    weights += shape["vocab_size"] * hidden
    weight_format = "float32" if config.engine.deterministic else config.engine.weight_format
    weight_width = {"float32": 4, "int8": 1 + 2 / GROUP}.get(weight_format, 2)
    kv_width = 4 if weight_format == "float32" else 2
    step_bytes = weights * weight_width + context * kv_size * kv_width * shape["num_hidden_layers"]
    bandwidth = row["copy_bytes_per_s"]
    limit = bandwidth / step_bytes
    share = row["engine"] / limit
    print(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s, {step_bytes / 1e6:.0f} MB a step: limit {limit:.1f} tokens/s")
    print(f"at concurrency 1 the engine reaches {share:.0%} of it (prefill included)")
    return {"step_bytes": step_bytes, "limit_tokens_per_s": limit, "share_of_limit": share}


def _long_prompt(core: EngineCore, streams: int = 16, length: int = 4000) -> dict[str, Any]:
    """Gaps of running streams while a long prompt arrives, beside a step that computes nothing but such a prompt."""
    _add(core, "alone", _prompts(1, length, core.limits.vocab_size)[0] + np.uint32(3), 1)
    alone = []
    while core.has_work():
        alone.append(_timed_step(core))
    for index, prompt in enumerate(_prompts(streams, 64, core.limits.vocab_size)):
        _add(core, f"s{index}", prompt, 400)
    for _ in range(streams // 4 + 4):
        core.step()
    before = [_timed_step(core) for _ in range(10)]
    _add(core, "long", _prompts(1, length, core.limits.vocab_size)[0], 1)
    during = []
    arrived = False
    while not arrived:
        start = time.perf_counter()
        outputs = core.step()
        during.append(time.perf_counter() - start)
        moved = {output.request_id for output in outputs}
        arrived = "long" in moved
        if len(moved - {"long"}) != streams:
            raise RuntimeError("a stream missed a step")
    core.abort("long")
    for index in range(streams):
        core.abort(f"s{index}")
    core.step()
    steady, worst, budget = statistics.median(before), max(during), max(alone)
    longer = {"longer_by_budgets": (worst - steady) / budget}
    longer["longer_by_budgets_median"] = (statistics.median(during) - steady) / statistics.median(alone)
    print(
        f"{streams} streams: step {steady * 1000:.0f} ms; "
        f"worst gap during a {length}-token prompt {worst * 1000:.0f} ms"
    )
    print(f"  (its {len(during)} steps, median {statistics.median(during) * 1000:.0f} ms; no stream missed one)")
    print(
        f"  longer by {longer['longer_by_budgets']:.2f} of the prompt's worst step alone ({budget * 1000:.0f} ms), "
        f"in the median by {longer['longer_by_budgets_median']:.2f}"
    )
    return {
        "steady_gap_s": steady,
        "long_prompt_worst_gap_s": worst,
        "long_prompt_steps": len(during),
        "budget_step_s": budget,
    } | longer


def _shared_prefix(core: EngineCore, length: int = 2000) -> dict[str, Any]:
    prefix = _prompts(1, length, core.limits.vocab_size)[0] + np.uint32(7)
    times = []
    for index in range(2):
        prompt = np.concatenate([prefix, np.full(20, 300 + index, np.uint32)])
        _add(core, f"p{index}", prompt, 1)
        start = time.perf_counter()
        while core.has_work():
            core.step()
        times.append(time.perf_counter() - start)
    print(
        f"time to first token of a {length}-token prefix: {times[0]:.3f} s, the second time {times[1]:.3f} s: "
        f"{times[0] / times[1]:.1f} times lower"
    )
    return {"prefix_first_s": times[0], "prefix_second_s": times[1], "prefix_speedup": times[0] / times[1]}


def _quality(model_dir: Path) -> int:
    """Mean KL divergence of the next token's distribution from float32, on a fixed text."""
    logits = {}
    for name in ("float32", "float16", "bfloat16", "int8"):
        try:
            logits[name] = _text_logits(model_dir, name)
        except StartupError as error:
            print(error)  # no code for this CPU
    ids = torch.tensor([_text_ids(model_dir)])
    with torch.inference_mode():
        logits["all in bfloat16 (transformers)"] = _reference(model_dir, "bfloat16")(ids).logits[0].float()
    exact = logits.pop("float32").log_softmax(-1)
    result = {}
    for name, values in logits.items():
        others = values.log_softmax(-1)
        divergence = (exact.exp() * (exact - others)).sum(-1).mean().item()
        agree = (exact.argmax(-1) == others.argmax(-1)).float().mean().item()
        result[name] = {"kl": divergence, "same_greedy_token": agree}
        print(f"{name:30s} mean KL divergence {divergence:.2e}, same greedy token at {agree:.1%} of {len(exact)}")
    print(json.dumps({"quality": result}))
    return 0


def _text_logits(model_dir: Path, weight_format: str) -> torch.Tensor:
    """Half of the text as a prompt, half decoded token by token: the kernels differ."""
    core: Any = build_core(resolve(None, [f"engine.weight_format={weight_format}"]), model_dir)
    text = _text_ids(model_dir)
    (sequence,) = sequences_of(EngineRequest("t", 1, SamplingParams(), (np.array(text, np.uint32),)), 8192, (), 0)
    sequence.block_table = list(range(len(text)))
    runner = core._runner
    half, budget = len(text) // 2, runner.max_batched_tokens
    chunks = [Chunk(sequence, start, min(budget, half - start)) for start in range(0, half, budget)]
    chunks += [Chunk(sequence, start, 1) for start in range(half, len(text))]
    with torch.inference_mode():
        batches = (build_batch([chunk], runner.block_size, runner.max_lookup_tokens) for chunk in chunks)
        return torch.cat([runner.model.logits(runner.forward(batch)) for batch in batches])


def _text_ids(model_dir: Path) -> list[int]:
    return list(Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(TEXT).ids)


def _timed_step(core: EngineCore) -> float:
    start = time.perf_counter()
    core.step()
    return time.perf_counter() - start


def _print_row(row: dict[str, Any]) -> None:
    line = f"concurrency {row['concurrency']:3d}: "
    for side in ("engine", *(f"transformers_{name}" for name in REFERENCE_DTYPES)):
        if side in row:
            line += f"{side} {row[side]:7.1f} tokens/s ({row[f'{side}_cpu_ms']:5.1f} ms CPU each), "
    if "ratio" in row:
        line += f"ratio to the faster {row['ratio']:.2f}"
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
