"""A tiny GGUF of the kind that the converter knows, written with gguf's own writer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, FFN = 4, 2, 8, 32, 64
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2"]  # the last one must never apply: digits stand alone
TOKENS = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


@dataclass
class TinyGguf:
    """A written file and what went into it."""

    path: Path
    tensors: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)  # as a reader will see them

    def add(self, writer: GGUFWriter, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> None:
        """Add a random tensor; quantized kinds are recorded by the values that they stand for."""
        seed = sum(name.encode())
        values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        if kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, values)
            self.tensors[name] = values
            return
        packed = quantize(values, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        self.tensors[name] = dequantize(packed, kind)


WriteGguf = Callable[..., TinyGguf]


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """``write_gguf(architecture="llama", pre="smollm", tied=True)`` writes one below ``tmp_path``."""

    def write(architecture: str = "llama", pre: str = "smollm", tied: bool = True, num_blocks: int = 2) -> TinyGguf:
        gguf = TinyGguf(tmp_path / "tiny.gguf")
        writer = GGUFWriter(gguf.path, architecture)
        writer.add_block_count(num_blocks)
        writer.add_context_length(128)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(FFN)
        writer.add_head_count(NUM_HEADS)
        writer.add_head_count_kv(NUM_KV_HEADS)
        writer.add_rope_freq_base(100000.0)
        writer.add_rope_dimension_count(HEAD_DIM)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(TOKENS)
        writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in TOKENS])
        writer.add_token_merges(MERGES)
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
        writer.add_add_bos_token(False)
        writer.add_chat_template("{% for message in messages %}{{ message['content'] }}\n{% endfor %}")

        f32, q4_1, q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0
        gguf.add(writer, "token_embd.weight", (len(TOKENS), HIDDEN), q8_0)
        gguf.add(writer, "output_norm.weight", (HIDDEN,), f32)
        if not tied:
            gguf.add(writer, "output.weight", (len(TOKENS), HIDDEN), q8_0)
        for block in range(num_blocks):
            gguf.add(writer, f"blk.{block}.attn_norm.weight", (HIDDEN,), f32)
            gguf.add(writer, f"blk.{block}.ffn_norm.weight", (HIDDEN,), f32)
            gguf.add(writer, f"blk.{block}.attn_q.weight", (NUM_HEADS * HEAD_DIM, HIDDEN), q4_1)
            gguf.add(writer, f"blk.{block}.attn_k.weight", (NUM_KV_HEADS * HEAD_DIM, HIDDEN), q4_1)
            gguf.add(writer, f"blk.{block}.attn_v.weight", (NUM_KV_HEADS * HEAD_DIM, HIDDEN), q4_1)
            gguf.add(writer, f"blk.{block}.attn_output.weight", (HIDDEN, NUM_HEADS * HEAD_DIM), q4_1)
            gguf.add(writer, f"blk.{block}.ffn_gate.weight", (FFN, HIDDEN), q4_1)
            gguf.add(writer, f"blk.{block}.ffn_up.weight", (FFN, HIDDEN), q4_1)
            gguf.add(writer, f"blk.{block}.ffn_down.weight", (HIDDEN, FFN), q4_1)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return gguf

    return write
