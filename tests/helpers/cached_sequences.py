"""Sequences in the CPU's KV cache, whose chunks attend in steps of any composition; and the same in float64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.torch_core.attention import MAX_LOOKUP_TOKENS, CpuAttention
from engine.torch_core.batch import build_batch
from engine.torch_core.model_spec import ModelSpec, read_spec
from engine.torch_core.request import sequences_of
from engine.torch_core.scheduler import Chunk
from tests.helpers.loaded_kernels import kernels
from tests.helpers.tiny_models import request

Shape = tuple[int, int, int, int]  # num_kv_heads, query heads of each, head_dim, block_size
Piece = tuple[int, int, int]  # index of a sequence, its first token to compute, number of tokens

SPARE_BLOCKS = 2  # that nobody has


def spec_of(shape: Shape) -> ModelSpec:
    num_kv_heads, group, head_dim, _ = shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 9,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": num_kv_heads * group,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    return read_spec(config)


class CachedSequences:
    """Random queries (length, num_heads, head_dim), keys and values (length, num_kv_heads, head_dim) of each."""

    def __init__(
        self, shape: Shape, lens: list[int], weight_format: str, seed: int, without_tiles: bool = False
    ) -> None:
        self.spec, self.block_size = spec_of(shape), shape[-1]
        self._format = (weight_format, without_tiles)
        generator = torch.Generator().manual_seed(seed)
        self.queries, self.keys, self.values = [], [], []
        for length in lens:
            sizes = (length, self.spec.num_kv_heads, self.spec.head_dim)
            self.queries.append(torch.randn(length, self.spec.num_heads, sizes[-1], generator=generator) * 3)
            # Numbers that float16 has, so that the formula knows what the cache holds.
            keys, values = torch.randn(2, *sizes, generator=generator).half().float()
            self.keys.append(keys)
            self.values.append(values)
        self.renew(seed)

    def renew(self, seed: int) -> None:
        """An empty cache, in which each sequence has other blocks; for as many threads as there are now."""
        weight_format, without_tiles = self._format
        lens = [len(keys) for keys in self.keys]
        num_blocks = sum(-(-length // self.block_size) for length in lens) + SPARE_BLOCKS
        free = iter(np.random.default_rng(seed).permutation(num_blocks).tolist())
        loaded = kernels(without_tiles)
        self.attention = CpuAttention(self.spec, num_blocks, self.block_size, weight_format, loaded)
        self._sequences = []
        for index, length in enumerate(lens):
            (sequence,) = sequences_of(request(f"r{index}", [5] * length), length + 1, (), index)
            sequence.block_table = [next(free) for _ in range(-(-length // self.block_size))]
            self._sequences.append(sequence)

    def compute(self, *pieces: Piece) -> list[Tensor]:
        """One step: results (num_tokens, num_heads * head_dim) of each piece."""
        self.begin(*pieces)
        return self.attend()

    def fill(self, piece: Piece) -> None:
        """Keys and values of a prompt alone, as a step leaves them that attended, which takes far longer."""
        self.begin(piece)
        self.attention._prefills.clear()
        self.attend()

    def begin(self, *pieces: Piece) -> None:
        chunks = [Chunk(self._sequences[index], start, count) for index, start, count in pieces]
        batch = build_batch(chunks, self.block_size, MAX_LOOKUP_TOKENS)
        self._row_of = [torch.from_numpy(rows) for rows in batch.row_of]
        order = torch.cat(self._row_of).argsort()
        rows = [
            torch.cat([parts[index][start : start + count] for index, start, count in pieces])[order]
            for parts in (self.queries, self.keys, self.values)
        ]
        heads = [part.size(1) for part in rows]
        self.rows = torch.cat(rows, dim=1).split(heads, dim=1)  # side by side, as in a model
        self.attention.begin(batch)

    def attend(self) -> list[Tensor]:
        with torch.inference_mode():
            output = self.attention(0, *self.rows)
        return [output[rows] for rows in self._row_of]

    def exact(self, piece: Piece, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        """In float64, of scaled queries, keys and values rounded to ``dtype``.

        Results as of ``compute``; the same of the values' magnitudes; the greatest sum of magnitudes that a row's
        score is made of.
        """
        index, start, count = piece
        end, group = start + count, self.spec.num_heads // self.spec.num_kv_heads
        scaled = self.queries[index][start:end] * self.spec.head_dim**-0.5
        queries, keys, values = (
            x.to(dtype).double().transpose(0, 1) for x in (scaled, self.keys[index][:end], self.values[index][:end])
        )
        keys, values = (x.repeat_interleave(group, dim=0) for x in (keys, values))
        seen = torch.ones(count, end, dtype=torch.bool).tril(start)
        weights = (queries @ keys.mT).masked_fill(~seen, -torch.inf).softmax(-1)
        magnitudes = (queries.abs() @ keys.abs().mT).amax(-1, keepdim=True).expand_as(queries)
        results = (weights @ values, weights @ values.abs(), magnitudes)
        result, spread, magnitude = (x.transpose(0, 1).flatten(1) for x in results)
        return result, spread, magnitude
