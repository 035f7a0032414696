"""GGUF file -> Hugging Face style folder, for Llama models with a GPT-2 style tokenizer.

Runs once, in the launcher, for the default model. It computes: nothing may import it before a conversion is
due. It must not import torch.

Weights are stored as float16. A Q4_1 weight is one of 16 levels between two float16 numbers, so its error
against the original model is some hundred times that of rounding the dequantized value to 11 bits; the folder
is half as large and loads twice as fast as with float32, and an engine that keeps float16 weights on a CPU
computes with exactly the numbers that a float32 reference reads from the same folder.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, TokenType, dequantize
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tokservice.models.progress import Progress

# GGUF name -> Hugging Face name, for the tensors outside the blocks and for those inside one.
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


class UnsupportedGguf(ValueError):
    """The file is of a kind that this converter does not know; the message says which."""


def convert(gguf_file: Path, folder: Path) -> None:
    """Write config, weights, tokenizer and chat template into ``folder``, which exists and is empty.

    Raises UnsupportedGguf, or OSError where the folder cannot be written.
    """
    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _require(fields, "general.architecture", "llama")
    _require(fields, "tokenizer.ggml.model", "gpt2")
    _require(fields, "tokenizer.ggml.pre", "smollm")

    config = _model_config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    _write_json(folder / "config.json", config)
    special_ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", special_ids)

    tokenizer = build_tokenizer(
        fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], fields["tokenizer.ggml.merges"]
    )
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")

    weights: dict[str, npt.NDArray[np.float16]] = {}
    with Progress("convert weights", len(reader.tensors), "tensor") as progress:
        for tensor in reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type)
            weights[hf_name(tensor.name)] = _to_float16(tensor.name, _in_hf_layout(tensor.name, values, config))
            progress.move_to(len(weights))
    try:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, for example
        raise OSError(str(error)) from error


def hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a Llama tensor. Raises UnsupportedGguf."""
    if gguf_name in _OUTER_NAMES:
        return _OUTER_NAMES[gguf_name]
    prefix, _, rest = gguf_name.partition(".")
    block, _, inner = rest.partition(".")
    if prefix != "blk" or inner not in _BLOCK_NAMES:
        raise UnsupportedGguf(f"unknown tensor {gguf_name}")
    return f"model.layers.{int(block)}.{_BLOCK_NAMES[inner]}"


def unpermute(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Query or key weights, (num_heads * head_dim, hidden), from GGUF's row order into Hugging Face's.

    GGUF places the two numbers that rotary embedding turns together side by side, Hugging Face half a head apart.
    """
    num_rows, num_columns = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return pairs.swapaxes(1, 2).reshape(num_rows, num_columns)


def build_tokenizer(tokens: list[str], token_types: list[int], merges: list[str]) -> Tokenizer:
    """Byte-level BPE whose digits stand alone. Control tokens are special; ids are positions in ``tokens``."""
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [_merge_pair(merge) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, token_types, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    return tokenizer


def _model_config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    num_heads = fields["llama.attention.head_count"]
    hidden_size = fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "head_dim": fields.get("llama.rope.dimension_count", hidden_size // num_heads),
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "torch_dtype": "float16",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the class of GPT-2 would drop the Digits step
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "add_bos_token": fields["tokenizer.ggml.add_bos_token"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }


def _in_hf_layout(name: str, values: npt.NDArray[np.float32], config: dict[str, Any]) -> npt.NDArray[np.float32]:
    if name.endswith(".attn_q.weight"):
        return unpermute(values, config["num_attention_heads"])
    if name.endswith(".attn_k.weight"):
        return unpermute(values, config["num_key_value_heads"])
    return values


def _to_float16(name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    if np.abs(values).max() > np.finfo(np.float16).max:
        raise UnsupportedGguf(f"{name} has values beyond the range of float16")
    return np.ascontiguousarray(values, dtype=np.float16)


def _merge_pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _shortest(value: float) -> float:
    """The shortest decimal of a number stored as float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _require(fields: dict[str, Any], key: str, expected: str) -> None:
    if fields.get(key) != expected:
        raise UnsupportedGguf(f"{key} is {fields.get(key)!r}; only {expected!r} can be converted")


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
