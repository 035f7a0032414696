"""Model, KV cache and kernels on the device of the configuration: from a step's rows to hidden states.

Engine process. The one place that knows how the devices differ.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from engine.model_files import read_json
from engine.threads import num_threads
from engine.torch_core.attention import DETERMINISTIC_MAX_TOKENS, MAX_LOOKUP_TOKENS, CpuAttention
from engine.torch_core.attention_cuda import FLASH_BLOCK_SIZE, PagedAttention, paged_attention
from engine.torch_core.batch import StepBatch
from engine.torch_core.decode_graphs import DecodeGraphs
from engine.torch_core.huge_pages import use_huge_pages
from engine.torch_core.kernels.calls import Kernels
from engine.torch_core.kernels.machine_code import load_kernels
from engine.torch_core.linear import can_bfloat16, has_bfloat16_products
from engine.torch_core.memory_profile import cache_bytes
from engine.torch_core.model import Model
from engine.torch_core.model_spec import ModelSpec, read_spec
from engine.torch_core.recorded_steps import RecordedSteps
from engine.torch_core.sampler import Sampled
from engine.torch_core.transfer import upload
from engine.torch_core.weights import Checkpoint
from tokservice.runtime.config import Config
from tokservice.wire.errors import StartupError

CPU_TOKEN_BUDGET = 256  # a step of so many prompt tokens takes some 0.1 s: what a long prompt may delay streams
GPU_TOKEN_BUDGET = 4096
CPU_BLOCK_SIZE = 64  # longer rows to look up; of 32, attention takes a fifth longer
GPU_BLOCK_SIZE = FLASH_BLOCK_SIZE
TELL_INTERVAL_S = 3.0
DTYPES = {"auto": torch.bfloat16, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Runner:
    """Computes steps. Not thread-safe."""

    model: Model
    attention: CpuAttention | PagedAttention
    recorded: DecodeGraphs | RecordedSteps  # plain decodes, on a GPU or on a CPU
    device: torch.device
    num_blocks: int
    block_size: int  # tokens of a block
    max_model_len: int
    max_lookup_tokens: int  # longest chunk that ``build_batch`` should arrange for lookup
    max_batched_tokens: int  # of one step
    overlaps: bool  # whether a step is queued before the tokens of the one before are read, see ``TorchEngine.step``

    def forward(self, batch: StepBatch, sampled: Sampled | None = None) -> Tensor:
        """Hidden states (num_rows, hidden_size) of a step; its keys and values are stored.

        ``sampled`` is the last step, where its tokens are not known yet.
        """
        token_ids = upload(batch.token_ids, self.device)
        if sampled is not None:
            token_ids = torch.where(token_ids < 0, sampled.token_ids[(-1 - token_ids).clamp_(min=0)], token_ids)
        hidden = self.recorded.run(batch, token_ids)
        if hidden is not None:
            return hidden
        self.attention.begin(batch)
        return self.model.forward(token_ids, upload(batch.positions, self.device), self.attention)


def load_runner(config: Config, model_dir: Path, tell: Callable[[str], None]) -> Runner:
    """Read a model folder. Raises StartupError with one line for the operator."""
    device = _device(config.engine.device)
    spec = read_spec(read_json(model_dir, "config.json", required=True))
    if config.model.max_model_len > spec.max_position:
        raise StartupError(f"model.max_model_len is above the model's own limit of {spec.max_position}")
    checkpoint = Checkpoint(model_dir)
    max_len = config.model.max_model_len or spec.max_position
    return (_load_cuda if device.type == "cuda" else _load_cpu)(config, spec, checkpoint, device, max_len, tell)


def _load_cpu(
    config: Config,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    device: torch.device,
    max_len: int,
    tell: Callable[[str], None],
) -> Runner:
    settings = config.engine
    weight_format = settings.weight_format
    if weight_format == "auto":
        weight_format = "bfloat16" if has_bfloat16_products() else "float16"
    if settings.deterministic:
        if settings.weight_format not in ("auto", "float32"):
            raise StartupError("engine.deterministic needs engine.weight_format auto or float32")
        weight_format = "float32"
    if config.model.dtype not in ("auto", "float32"):
        raise StartupError("model.dtype: on a CPU activations are float32; choose engine.weight_format instead")
    torch.set_num_threads(num_threads(settings, len(os.sched_getaffinity(0))))
    cache_tokens = settings.kv_cache_tokens or settings.kv_cache_bytes // CpuAttention.bytes_per_token(
        spec, weight_format
    )
    block_size = settings.block_size or CPU_BLOCK_SIZE
    num_blocks = _num_blocks(cache_tokens, block_size)
    _check_memory(num_blocks * block_size * CpuAttention.bytes_per_token(spec, weight_format))
    max_len = _fitting_len(config.model.max_model_len, max_len, num_blocks * block_size)
    kernels = Kernels(load_kernels(tell))
    if weight_format == "bfloat16" and not can_bfloat16(kernels):
        raise StartupError("engine.weight_format bfloat16 needs a CPU with AVX-512 or AMX; auto chooses float16 here")
    model = Model(
        spec,
        checkpoint,
        weight_format=weight_format,
        device=device,
        dtype=torch.float32,
        max_len=max_len,
        kernels=kernels,
        progress=lambda layers: _progress(layers, tell),
    )
    log.info("huge pages bytes=%d", use_huge_pages())
    budget = settings.max_num_batched_tokens or CPU_TOKEN_BUDGET
    budget = min(budget, DETERMINISTIC_MAX_TOKENS) if settings.deterministic else budget
    attention = CpuAttention(spec, num_blocks, block_size, weight_format, kernels)
    return Runner(
        model=model,
        attention=attention,
        recorded=RecordedSteps(model, attention, kernels, budget),
        device=device,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_len,
        max_lookup_tokens=budget if settings.deterministic else MAX_LOOKUP_TOKENS,
        max_batched_tokens=budget,
        overlaps=False,
    )


def _load_cuda(
    config: Config,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    device: torch.device,
    max_len: int,
    tell: Callable[[str], None],
) -> Runner:
    settings = config.engine
    if settings.deterministic:
        raise StartupError("engine.deterministic is for a CPU: on a GPU kernels depend on the batch")
    if settings.weight_format != "auto":
        raise StartupError("engine.weight_format is for a CPU: on a GPU choose model.dtype")
    if device.index is not None:
        torch.cuda.set_device(device)  # streams, events and graphs are made on the current one
    dtype = DTYPES[config.model.dtype]
    model = Model(
        spec,
        checkpoint,
        weight_format="plain",
        device=device,
        dtype=dtype,
        max_len=max_len,
        progress=lambda layers: _progress(layers, tell),
    )
    budget = settings.max_num_batched_tokens or GPU_TOKEN_BUDGET
    block_size = settings.block_size or GPU_BLOCK_SIZE
    cache_tokens = settings.kv_cache_tokens
    if not cache_tokens:
        one_block = paged_attention(spec, 1, block_size, device, dtype, max_len)
        try:
            room = cache_bytes(
                model, one_block, settings.gpu_memory_utilization, budget, settings.max_num_seqs, max_len
            )
        except torch.OutOfMemoryError as error:
            raise StartupError(
                "the GPU has no room for a step: lower engine.max_num_batched_tokens or engine.max_num_seqs"
            ) from error
        cache_tokens = room // PagedAttention.bytes_per_token(spec, dtype)
    num_blocks = _num_blocks(cache_tokens, block_size)
    max_len = _fitting_len(config.model.max_model_len, max_len, num_blocks * block_size)
    attention = paged_attention(spec, num_blocks, block_size, device, dtype, max_len)
    graphs = DecodeGraphs(model, attention, record=True)
    graphs.record_all(settings.max_num_seqs)
    return Runner(
        model=model,
        attention=attention,
        recorded=graphs,
        device=device,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_len,
        max_lookup_tokens=1,
        max_batched_tokens=budget,
        overlaps=True,
    )


def _fitting_len(asked: int, max_len: int, cache_tokens: int) -> int:
    """The longest sequence that the KV cache holds. Raises StartupError where that is less than was ``asked`` for."""
    if asked > cache_tokens:
        raise StartupError(
            f"model.max_model_len is {asked}, but the KV cache holds {cache_tokens} tokens: lower it, or enlarge the "
            "cache (engine.kv_cache_bytes on a CPU, engine.gpu_memory_utilization on a GPU)"
        )
    if max_len > cache_tokens:
        log.warning("the KV cache is smaller than the model's context tokens=%d context=%d", cache_tokens, max_len)
    return min(max_len, cache_tokens)


def _check_memory(num_bytes: int) -> None:
    """Of a KV cache, which takes its memory as it fills: the kernel would end the engine some time later."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > memory:
        raise StartupError(
            f"the KV cache would have {num_bytes >> 20} MiB where the machine has {memory >> 20}: "
            "lower engine.kv_cache_bytes or engine.kv_cache_tokens"
        )


def _progress(layers: range, tell: Callable[[str], None]) -> Iterator[int]:
    """Each layer is loaded before the next is asked for. On a terminal of its own it is a bar too."""
    told_s = -math.inf
    for index in tqdm(layers, desc="layers", unit="layer", disable=None):
        if time.monotonic() - told_s > TELL_INTERVAL_S:
            told_s = time.monotonic()
            tell(f"loading weights: {100 * index // len(layers)} %")
        yield index


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise StartupError(f"engine.device: no such device {name}") from error
    num_devices = {"cpu": 1, "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0}
    if (device.index or 0) >= num_devices.get(device.type, 0):
        raise StartupError(f"engine.device: {name} is not usable here; choose auto, cpu or cuda")
    return device


def _num_blocks(cache_tokens: int, block_size: int) -> int:
    if cache_tokens < block_size:
        raise StartupError(f"the KV cache has no room for one block of {block_size} tokens")
    return cache_tokens // block_size
