"""The first step of an engine, before a client waits for it.

Engine process. Kernels are made for their shapes, threads start, the KV cache gets its first pages: the first prompt
took 0.35 s, where the next ones took 0.08.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from engine.core import EngineRequest
from engine.torch_core.batch import build_batch
from engine.torch_core.request import sequences_of
from engine.torch_core.runner import Runner
from engine.torch_core.scheduler import Chunk
from tokservice.wire.errors import StartupError
from tokservice.wire.messages import SamplingParams


@torch.inference_mode()
def warm_up(runner: Runner) -> None:
    """Compute a full step of prompt, and one of decoding, in blocks that no request has yet.

    Raises StartupError where the weights give no numbers: every request would end with an error.
    """
    num_tokens = min(runner.max_batched_tokens, runner.max_model_len)
    request = EngineRequest("warm-up", 1, SamplingParams(), (np.zeros(num_tokens, np.uint32),))
    (sequence,) = sequences_of(request, num_tokens + 1, (), 0)
    sequence.block_table = list(range(-(-num_tokens // runner.block_size)))
    for chunk in (Chunk(sequence, 0, num_tokens), Chunk(sequence, num_tokens - 1, 1)):
        batch = build_batch([chunk], runner.block_size, runner.max_lookup_tokens)
        if not math.isfinite(runner.model.logits(runner.forward(batch)[-1:]).max().item()):  # waits for it
            raise StartupError(
                "the model computes no numbers: its weights are damaged, or too large for engine.weight_format"
            )
