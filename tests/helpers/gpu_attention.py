"""The GPU's attention and arrangement of steps on a CPU, with a stand-in for flash-attn's kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.core import EngineCore
from engine.torch_core.attention_cuda import FlashAttention, GatherAttention, PagedAttention
from engine.torch_core.decode_graphs import DecodeGraphs
from engine.torch_core.model_spec import ModelSpec


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
    block_table: Tensor,
) -> Tensor:
    """What flash-attn 2 documents: queries (total, heads, dim), paged k and v (blocks, block_size, kv_heads, dim).

    The mask is aligned to the bottom right: the last query of a sequence sees all its keys.
    """
    assert causal
    assert {one.dtype for one in (cu_seqlens_q, cu_seqlens_k, block_table)} == {torch.int32}
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == block_table.stride(-1) == 1
    outputs = []
    for index, table in enumerate(block_table):
        lo, hi = cu_seqlens_q[index : index + 2].tolist()
        first, last = cu_seqlens_k[index : index + 2].tolist()
        count, context = hi - lo, last - first
        assert 0 < count <= max_seqlen_q
        assert count <= context <= min(max_seqlen_k, len(table) * k.shape[1])
        keys, values = (one[table.long()].flatten(0, 1)[:context].transpose(0, 1) for one in (k, v))
        mask = torch.ones(count, context, dtype=torch.bool).tril(context - count)
        query = q[lo:hi].transpose(0, 1)
        output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


def gpu_attention(kind: str, spec: ModelSpec, num_blocks: int, block_size: int, max_len: int) -> PagedAttention:
    """A "gather" or "flash" attention on the CPU, float32."""
    cpu = torch.device("cpu")
    if kind == "gather":
        return GatherAttention(spec, num_blocks, block_size, cpu, torch.float32)
    kernel = flash_attn_varlen_func
    return FlashAttention(spec, num_blocks, block_size, cpu, torch.float32, kernel=kernel, max_len=max_len)


def arrange_as_on_a_gpu(core: EngineCore, kind: str) -> None:
    """Let a new torch engine on a CPU compute as one on a GPU does, but for the recording of graphs."""
    engine: Any = core
    runner = engine._runner
    spec, max_len = runner.model.spec, runner.max_model_len
    runner.attention = gpu_attention(kind, spec, runner.num_blocks, runner.block_size, max_len)
    runner.recorded = DecodeGraphs(runner.model, runner.attention, record=False)
    runner.recorded.record_all(16)
    runner.max_lookup_tokens = 1
    runner.overlaps = True
