"""Logits and greedy text of each model family against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.load import build_core
from engine.model_files import read_json
from engine.torch_core.attention import CpuAttention
from engine.torch_core.attention_cuda import PagedAttention
from engine.torch_core.batch import build_batch
from engine.torch_core.decode_graphs import DecodeGraphs
from engine.torch_core.kernels.layout import TILE_DEPTH
from engine.torch_core.model import Model
from engine.torch_core.model_spec import read_spec
from engine.torch_core.packed_linear import PackedLinear
from engine.torch_core.request import sequences_of
from engine.torch_core.scheduler import Chunk
from engine.torch_core.weights import Checkpoint
from tests.helpers.gpu_attention import gpu_attention
from tests.helpers.kernel_checks import rounded_to_int8
from tests.helpers.loaded_kernels import kernels, require_bfloat16, require_tiles
from tests.helpers.tiny_models import (
    COMMON,
    FAMILIES,
    VOCAB_SIZE,
    drain,
    ids_of,
    make_engine,
    reference_model,
    request,
    run_alone,
    save_tiny_model,
)
from tokservice.runtime.config import from_dict
from tokservice.wire.errors import StartupError

PROMPT = np.random.default_rng(0).integers(2, VOCAB_SIZE, 150).astype(np.uint32)


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Model]:
    def build(family: str, weight_format: str, without_tiles: bool = False, head_dim: int | None = None) -> Model:
        save_tiny_model(family, tmp_path, head_dim)
        spec = read_spec(read_json(tmp_path, "config.json"))
        checkpoint = Checkpoint(tmp_path)
        cpu = torch.device("cpu")
        return Model(
            spec,
            checkpoint,
            weight_format=weight_format,
            device=cpu,
            dtype=torch.float32,
            max_len=spec.max_position,
            kernels=None if weight_format == "plain" else kernels(without_tiles),
        )

    return build


def logits_of(
    model: Model,
    pieces: list[int],
    max_lookup_tokens: int,
    kind: str = "",
    weight_format: str = "float32",
    without_tiles: bool = False,
    block_size: int = 8,
) -> torch.Tensor:
    """Logits of PROMPT, computed in pieces over scattered blocks, on a CPU or in a GPU's way."""
    loaded = kernels(without_tiles)
    attention: CpuAttention | PagedAttention = CpuAttention(model.spec, 64, block_size, weight_format, loaded)
    graphs = None
    if kind:
        attention = gpu_attention(kind, model.spec, 64, block_size, max_len=256)
        graphs = DecodeGraphs(model, attention, record=False)
    (sequence,) = sequences_of(request("r", PROMPT), 512, (), 0)
    sequence.block_table = np.random.default_rng(1).permutation(64)[: -(-len(PROMPT) // block_size)].tolist()
    rows = []
    start = 0
    with torch.inference_mode():
        for size in pieces:
            batch = build_batch([Chunk(sequence, start, size)], block_size, max_lookup_tokens)
            ids, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions)
            hidden = None if graphs is None else graphs.run(batch, ids)
            if hidden is None:
                attention.begin(batch)
                hidden = model.forward(ids, positions, attention)
            rows.append(model.logits(hidden[torch.from_numpy(batch.row_of[0])]))
            start += size
    return torch.cat(rows)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("max_lookup_tokens", "kind"),
    [(1, ""), (1000, ""), (1, "gather"), (1, "flash")],
    ids=["prefill", "lookup", "gather", "flash"],
)
def test_logits_equal_transformers(load: Callable[..., Model], family: str, max_lookup_tokens: int, kind: str) -> None:
    logits = logits_of(load(family, "float32"), [70, 1, 9, 1, 69], max_lookup_tokens, kind)
    with torch.inference_mode():
        expected = reference_model(family)(torch.from_numpy(PROMPT.astype(np.int64))[None]).logits[0]
    error = (logits - expected).abs().max() / expected.abs().max()
    assert error < 1e-4


@pytest.mark.parametrize(
    ("weight_format", "tolerance"), [("plain", 1e-5), ("float16", 5e-3), ("bfloat16", 0.03), ("int8", 0.05)]
)
def test_weight_formats_come_close(load: Callable[..., Model], weight_format: str, tolerance: float) -> None:
    if weight_format == "bfloat16":
        require_bfloat16()
    pieces = [60, 1, 8, 9, 72]  # kernels differ by the number of rows
    attention = "float32" if weight_format == "plain" else weight_format
    logits = logits_of(load("qwen2", weight_format), pieces, 1, weight_format=attention)
    with torch.inference_mode():
        expected = reference_model("qwen2")(torch.from_numpy(PROMPT.astype(np.int64))[None]).logits[0]
    assert (logits - expected).norm() / expected.norm() < tolerance


def test_int8_computes_in_float32(load: Callable[..., Model]) -> None:
    """Nothing is rounded but the weights of layers and head."""
    logits = logits_of(load("qwen2", "int8"), [60, 1, 8, 9, 72], 1)
    reference = reference_model("qwen2")
    with torch.inference_mode():
        for name, parameter in reference.named_parameters():
            if name.endswith(("proj.weight", "lm_head.weight")):
                parameter.copy_(rounded_to_int8(parameter))
        expected = reference(torch.from_numpy(PROMPT.astype(np.int64))[None]).logits[0]
    assert (logits - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_by_the_matrix_unit_comes_close(load: Callable[..., Model], family: str) -> None:
    """Attention of prompts too, where heads and blocks are made of whole tiles."""
    require_tiles()
    model = load(family, "bfloat16", head_dim=TILE_DEPTH)
    logits = logits_of(model, [70, 1, 9, 1, 69], 1, weight_format="bfloat16", block_size=TILE_DEPTH)
    with torch.inference_mode():
        expected = reference_model(family, TILE_DEPTH)(torch.from_numpy(PROMPT.astype(np.int64))[None]).logits[0]
    assert (logits - expected).norm() / expected.norm() < 0.03


def test_bfloat16_comes_close_without_a_matrix_unit(load: Callable[..., Model]) -> None:
    """Products of a few rows by kernels of our own, of more by oneDNN."""
    require_bfloat16(without_tiles=True)
    model = load("llama-biased", "bfloat16", without_tiles=True)
    assert isinstance(model._head, PackedLinear)
    logits = logits_of(model, [60, 1, 8, 9, 72], 1, weight_format="bfloat16", without_tiles=True)
    with torch.inference_mode():
        expected = reference_model("llama-biased")(torch.from_numpy(PROMPT.astype(np.int64))[None]).logits[0]
    assert (logits - expected).norm() / expected.norm() < 0.03


def test_greedy_ids_alone_and_batched(tmp_path: Path) -> None:
    save_tiny_model("llama3", tmp_path)
    model = reference_model("llama3")
    rng = np.random.default_rng(2)
    prompts = [rng.integers(2, VOCAB_SIZE, length) for length in (1, 2, 7, 16, 31, 32, 33, 60, 90, 130)]
    with torch.inference_mode():
        expected = [
            model.generate(
                torch.from_numpy(prompt)[None],
                do_sample=False,
                max_new_tokens=20,
                attention_mask=torch.ones(1, len(prompt)),
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
    engine = make_engine(tmp_path, max_num_batched_tokens=48)
    requests = [request(f"r{i}", p, temperature=0.0, max_tokens=20) for i, p in enumerate(prompts)]
    assert [run_alone(engine, one) for one in requests] == expected
    for one in requests:
        engine.add(one)
    outputs = drain(engine)
    assert [ids_of(outputs, f"r{i}") for i in range(len(prompts))] == expected


def test_sharded_weights(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    save_tiny_model("mistral", whole)
    save_tiny_model("mistral", parts, max_shard_size="100KB")
    assert len(list(parts.glob("*.safetensors"))) > 1
    one = request("r", PROMPT, temperature=0.0)
    assert run_alone(make_engine(whole), one) == run_alone(make_engine(parts), one)


SHAPE: dict[str, Any] = {
    "vocab_size": 9,
    "hidden_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 1,
    "intermediate_size": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
USED = {"sliding_window": 64, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("family", "changes", "max_position"),
    [
        ("Mistral", {"sliding_window": 64}, 64),
        ("Mistral", {"sliding_window": None}, 512),
        ("Mistral", {"max_position_embeddings": 9000}, 4096),
        ("Qwen2", {"sliding_window": 64}, 512),
        ("Qwen2", USED | {"max_window_layers": 2}, 64),
        ("Qwen2", USED | {"max_window_layers": 4}, 512),  # no layer is above
        ("Qwen3", USED | {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, 64),
        ("Qwen3", USED | {"layer_types": ["full_attention"] * 4, "max_window_layers": 2}, 512),
    ],
    ids=str,
)
def test_sliding_windows_cut_the_context(family: str, changes: dict[str, Any], max_position: int) -> None:
    config = SHAPE | {"architectures": [f"{family}ForCausalLM"]} | changes
    assert read_spec(config).max_position == max_position


@pytest.mark.parametrize("family", ["Mistral", "Qwen2"])
def test_up_to_the_window_attention_is_full(tmp_path: Path, family: str) -> None:
    """The last position of the context that is left attends to exactly what a windowed model attends to."""
    import transformers

    windowed = getattr(transformers, f"{family}Config")(**(COMMON | USED | {"max_window_layers": 1}))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(windowed).eval()
    model.save_pretrained(tmp_path)
    engine = make_engine(tmp_path)
    assert engine.limits.max_model_len == 64
    engine.add(request("r", PROMPT[:63], max_tokens=5, num_prompt_logprobs=0, num_logprobs=0, temperature=0.0))
    (output,) = drain(engine)
    with torch.inference_mode():
        expected = model(torch.from_numpy(PROMPT[:63].astype(np.int64))[None]).logits[0].log_softmax(-1).numpy()
    assert output.prompt_logprobs is not None
    assert output.logprobs is not None
    got = [*output.prompt_logprobs.logprobs[:, 0], output.logprobs.logprobs[0, 0]]
    np.testing.assert_allclose(got, expected[range(63), [*PROMPT[1:63], output.token_ids[0]]], atol=1e-4)


@pytest.mark.parametrize(
    ("rope", "max_position"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"type": "yarn", "factor": 4.0}, 2048),  # as in the cards of Qwen2.5 and Qwen3
        ({"rope_type": "yarn", "original_max_position_embeddings": 64}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"rope_type": "dynamic", "factor": 4.0}, 512),
        ({"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 128}, 128),
        ({"rope_type": "default"}, 512),
    ],
    ids=str,
)
def test_stretched_positions_lengthen_the_context(rope: dict[str, Any], max_position: int) -> None:
    config = SHAPE | {"architectures": ["LlamaForCausalLM"], "rope_scaling": rope}
    assert read_spec(config).max_position == max_position


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, r"MambaForCausalLM.*LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": None}, "unsupported architecture"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}, "rope_parameters": None},
            "longrope.*yarn",
        ),
        ({"rope_scaling": {"rope_type": "linear"}, "rope_parameters": None}, "lacks the key 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_hidden_layers": 3}, r"lack the tensor model\.layers\.2\."),
        # Ids that the embeddings do not have ended the engine.
        ({"vocab_size": 300}, r"embed_tokens\.weight is \(256, 64\), by config\.json it would be \(300, 64\)"),
        ({"num_key_value_heads": 1}, r"k_proj\.weight is \(32, 64\)"),
        ({"num_hidden_layers": 0}, "no layers"),
        ({"max_position_embeddings": None}, "has an unexpected form"),
        ({"rope_scaling": "yarn", "rope_parameters": None}, "has an unexpected form"),
        # NaN in every position, and so in every logit.
        ({"rope_theta": None, "rope_parameters": None}, "rope_theta .* is no number above 0"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_start_up_faults_are_one_clear_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_tiny_model("llama3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=message) as caught:
        make_engine(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
def test_quantized_checkpoints_are_refused(tmp_path: Path, kind: torch.dtype) -> None:
    """Their weights without the scales make noise, and nobody says why."""
    tensors = save_tiny_model("llama3", tmp_path) / "model.safetensors"
    weights = load_file(tensors)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(weights | {name: weights[name].to(kind), f"{name}_scale_inv": torch.ones(1)}, tensors)
    with pytest.raises(StartupError, match=f"{name} is .*: this engine reads no quantized checkpoints"):
        make_engine(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.norm.weight", torch.ones(32), r"norm\.weight is \(32,\), by config\.json it would be \(64,\)"),
        ("model.layers.1.self_attn.q_proj.bias", torch.ones(1), r"q_proj\.bias is \(1,\)"),
        ("model.layers.1.mlp.up_proj.weight", torch.full((128, 64), torch.nan), "the model computes no numbers"),
    ],
    ids=["norm", "bias", "nan"],
)
def test_weights_that_give_no_logits_are_refused(tmp_path: Path, name: str, value: torch.Tensor, message: str) -> None:
    """Kernels read beyond a norm or bias that is too short; with NaN among the weights every request was an error."""
    tensors = save_tiny_model("llama-biased", tmp_path) / "model.safetensors"
    weights = load_file(tensors)
    assert name in weights
    save_file(weights | {name: value}, tensors)
    with pytest.raises(StartupError, match=message):
        make_engine(tmp_path)


def test_a_cache_larger_than_the_memory_is_refused(tmp_path: Path) -> None:
    """It takes its memory as it fills: the engine was killed hours later, or crashed at each start."""
    save_tiny_model("llama3", tmp_path)
    with pytest.raises(StartupError, match=r"lower engine\.kv_cache_bytes"):
        make_engine(tmp_path, kv_cache_tokens=0, kv_cache_bytes=1 << 46)


def test_a_context_that_the_cache_cannot_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It was cut without a word, also where it had been asked for."""
    save_tiny_model("llama3", tmp_path)
    engine = {"weight_format": "float32", "block_size": 32, "kv_cache_tokens": 256}
    assert (
        build_core(from_dict({"engine": engine, "model": {"max_model_len": 256}}), tmp_path).limits.max_model_len == 256
    )
    assert not caplog.records
    assert build_core(from_dict({"engine": engine}), tmp_path).limits.max_model_len == 256
    assert "tokens=256 context=512" in caplog.text
    with pytest.raises(StartupError, match=r"max_model_len is 257, but the KV cache holds 256 tokens"):
        build_core(from_dict({"engine": engine, "model": {"max_model_len": 257}}), tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "model-00001-of-00002.safetensors"}, "has no model-00001-of-00002"),
        ([], "index.json has an unexpected form"),
        ({"a": 5}, "index.json has an unexpected form"),
    ],
    ids=str,
)
def test_an_index_of_shards_that_are_not_there(tmp_path: Path, weight_map: object, message: str) -> None:
    save_tiny_model("qwen2", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(StartupError, match=message):
        make_engine(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_files(tmp_path: Path, name: str) -> None:
    save_tiny_model("qwen2", tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(StartupError, match=name):
        make_engine(tmp_path)


def test_config_without_a_key(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(StartupError, match="num_attention_heads"):
        make_engine(tmp_path)


@pytest.mark.parametrize("family", ["llama3", "llama-linear", "qwen2-yarn", "qwen3"])
def test_positions_as_older_checkpoints_state_them(tmp_path: Path, family: str) -> None:
    """Before transformers 5 there were rope_theta and rope_scaling, whose type was called "type" at first."""
    save_tiny_model(family, tmp_path)
    config = read_json(tmp_path, "config.json")
    new = read_spec(config)
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    old = read_spec(config | {"rope_scaling": None if rope["type"] == "default" else rope})
    np.testing.assert_array_equal(old.inv_freq, new.inv_freq)
    assert (old.rope_scale, old.max_position) == (new.rope_scale, new.max_position)


def test_weights_stored_in_half_precision(tmp_path: Path) -> None:
    import transformers

    reference_model("qwen2-yarn").bfloat16().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    one = request("r", PROMPT[:60], temperature=0.0, max_tokens=1, num_logprobs=3, num_prompt_logprobs=0)
    engine = make_engine(tmp_path)
    engine.add(one)
    (output,) = drain(engine)
    with torch.inference_mode():
        expected = model(torch.from_numpy(PROMPT[:60].astype(np.int64))[None]).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    got = output.prompt_logprobs.logprobs[:, 0]
    np.testing.assert_allclose(got, expected[range(59), PROMPT[1:60].astype(np.int64)], atol=1e-3)
