"""Attention of a run of prompt tokens to themselves and to all tokens before, on a CPU.

Engine process; pure. In float32 by torch's scaled_dot_product_attention. On CPUs that multiply bfloat16 by products of
whole tiles in that format, with sums and softmax in float32 inside of the kernels: twice as fast (256 rows of 9 heads:
0.4 against 0.9 ms at 256 tokens of context, 6 against 14 at 4,000), where scaled_dot_product_attention of bfloat16
takes as long as that of float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

TILE_SCORES = 2**21  # of one tile, 4 MiB: they stay in the CPU's caches

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def causal_mask(num_rows: int, start: int, dtype: torch.dtype) -> Tensor | None:
    """What keeps ``num_rows`` tokens, of which the first is number ``start``, from attending to later ones.

    float32: (num_rows, start + num_rows) bool, or None where ``start`` is 0. bfloat16: (num_rows, 1, num_rows), 0 or
    -inf, for the scores between the tokens themselves; before them, nothing is masked.
    """
    if dtype is torch.bfloat16:
        return torch.full((num_rows, num_rows), -torch.inf, dtype=dtype).triu_(1).unsqueeze(1)
    if start == 0:
        return None
    return torch.ones(num_rows, start + num_rows, dtype=torch.bool).tril(start)


def _in_float32(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    num_kv_heads, num_rows = len(key), len(query)
    queries = query.view(num_rows, num_kv_heads, -1, query.shape[-1]).permute(1, 2, 0, 3)
    group = queries.shape[1]
    output = F.scaled_dot_product_attention(
        queries,
        key.mT.contiguous().unsqueeze(1).expand(-1, group, -1, -1),
        value.unsqueeze(1).expand(-1, group, -1, -1),
        attn_mask=mask,
        is_causal=mask is None,
        scale=1.0,
    )  # (num_kv_heads, group, num_rows, head_dim)
    return output.permute(2, 0, 1, 3).reshape(num_rows, -1)


def _in_bfloat16(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    assert mask is not None
    num_kv_heads, _, context = key.shape
    num_rows, num_heads, head_dim = query.shape
    start = context - num_rows
    queries = query.bfloat16().view(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1)
    tile = max(1, TILE_SCORES // (num_heads * context))
    outputs = []
    for lo in range(0, num_rows, tile):
        hi = min(lo + tile, num_rows)
        scores = torch.bmm(queries[:, lo:hi].flatten(1, 2), key[..., : start + hi])
        scores.view(num_kv_heads, hi - lo, -1, start + hi)[..., start:].add_(mask[lo:hi, :, :hi])
        outputs.append(torch.bmm(scores.softmax(dim=-1), value[:, : start + hi]).view(num_kv_heads, hi - lo, -1))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return output.transpose(0, 1).reshape(num_rows, -1).float()


# Scaled queries (num_rows, num_heads, head_dim) float32, keys (num_kv_heads, head_dim, context) and values
# (num_kv_heads, context, head_dim) in the format, a mask -> (num_rows, num_heads * head_dim) float32. The rows are the
# last tokens of the context.
ATTEND: dict[torch.dtype, Attend] = {torch.float32: _in_float32, torch.bfloat16: _in_bfloat16}
