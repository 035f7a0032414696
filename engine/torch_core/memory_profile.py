"""How many tokens of KV cache a GPU has room for: one step as large as any will be is computed, and its peak measured.

Engine process. The cache of that step is one block, which all its tokens share: what it computes is of no use, but
takes as much memory as a real step.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.core import EngineRequest
from engine.torch_core.attention_cuda import PagedAttention
from engine.torch_core.batch import build_batch
from engine.torch_core.model import Model
from engine.torch_core.request import Sequence, sequences_of
from engine.torch_core.sampler import Sampler
from engine.torch_core.scheduler import Chunk
from engine.torch_core.transfer import upload
from tokservice.wire.messages import SamplingParams

DEAREST = SamplingParams(top_p=0.9, presence_penalty=0.1, num_logprobs=8)  # of what sampling may be asked for


def room_for_cache(total: int, free: int, step_peak: int, utilization: float) -> int:
    """Bytes for the KV cache of a GPU with ``total`` bytes, so that all of it stays within the share asked for.

    ``free`` is what is left beside the weights, the CUDA context and other processes; ``step_peak`` what a step needs.
    """
    return max(0, int(total * utilization) - (total - free) - step_peak)


def cache_bytes(
    model: Model, attention: PagedAttention, utilization: float, max_tokens: int, max_seqs: int, max_len: int
) -> int:
    """Measure on the attention's GPU; ``attention`` has one block, ``max_tokens`` and ``max_seqs`` are of a step."""
    device = attention.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    heaviest_steps(model, attention, max_tokens, max_seqs, max_len)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()  # what the steps reserved counts as free again
    free, total = torch.cuda.mem_get_info(device)
    return room_for_cache(total, free, peak, utilization)


@torch.inference_mode()
def heaviest_steps(model: Model, attention: PagedAttention, max_tokens: int, max_seqs: int, max_len: int) -> None:
    """A full step of prefill at the end of the longest prompts, then one of decodes that are all as long."""
    vocab_size = model.spec.vocab_size
    prefills = [_chunk(attention, min(max_tokens - done, max_len), max_len) for done in range(0, max_tokens, max_len)]
    decodes = [_chunk(attention, 1, max_len) for _ in range(min(max_seqs, max_tokens))]
    sampler = Sampler(vocab_size, attention.device)
    for chunks in (prefills, decodes):
        batch = build_batch(chunks, attention.block_size, 1)
        attention.begin(batch)
        positions = upload(batch.positions, attention.device)
        hidden = model.forward(upload(batch.token_ids, attention.device), positions, attention)
        rows = upload(np.arange(len(decodes)) % len(positions), attention.device)
        sequences = [chunk.sequence for chunk in decodes]
        sampler.sample(model.logits(hidden.index_select(0, rows)), sequences).read()


def _chunk(attention: PagedAttention, num_tokens: int, max_len: int) -> Chunk:
    """The last tokens of a sequence of the greatest length, whose table names one block again and again."""
    prompt = np.zeros(max_len, np.uint32)
    sequence: Sequence
    (sequence,) = sequences_of(EngineRequest("profile", 1, DEAREST, (prompt,)), max_len + 1, (), 0)
    sequence.block_table = [0] * -(-max_len // attention.block_size)
    return Chunk(sequence, max_len - num_tokens, num_tokens)
