"""Tiny random checkpoints of each model family, as transformers writes them, and a driver for engine cores."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from engine.core import ChoiceOutput, EngineCore, EngineRequest
from engine.load import build_core
from tokservice.runtime.config import from_dict
from tokservice.wire.messages import SamplingParams

VOCAB_SIZE = 256
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    "mistral": ("Mistral", {"head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN_ROPE}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-yarn": (
        "Qwen3",
        {
            "head_dim": 8,  # times 4 heads is less than hidden_size
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rope_parameters": YARN_ROPE | {"mscale": 1.3, "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2},
        },
    ),
}


def reference_model(family: str, head_dim: int | None = None) -> Any:
    """The transformers model, float32, with random weights, biases and norms; ``head_dim``: not the family's."""
    import torch
    import transformers

    name, changes = FAMILIES[family]
    torch.manual_seed(len(family))
    config = getattr(transformers, f"{name}Config")(**(COMMON | changes | ({"head_dim": head_dim} if head_dim else {})))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or "bias" in key:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def save_tiny_model(family: str, folder: Path, head_dim: int | None = None, **options: Any) -> Path:
    """Write the checkpoint of ``reference_model`` into a folder."""
    reference_model(family, head_dim).save_pretrained(folder, **options)
    return folder


def make_engine(model_dir: Path, *, overlaps: bool = False, **settings: Any) -> EngineCore:
    """A torch engine with ``engine.*`` settings; float32 unless said otherwise.

    ``overlaps``: its steps overlap, as on a GPU.
    """
    engine = {"threads": 1, "weight_format": "float32", "block_size": 32, "kv_cache_tokens": 4096} | settings
    core: Any = build_core(from_dict({"engine": engine}), model_dir)
    core._runner.overlaps = overlaps
    return core  # type: ignore[no-any-return]


def request(name: str, prompt: Iterable[int], **sampling: Any) -> EngineRequest:
    """A first attempt with one prompt."""
    ids = np.array(list(prompt), dtype=np.uint32)
    return EngineRequest(name, 1, SamplingParams(**sampling), (ids,))


def drain(engine: EngineCore) -> list[ChoiceOutput]:
    """All outputs until nothing is left to do."""
    outputs: list[ChoiceOutput] = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def ids_of(outputs: Iterable[ChoiceOutput], name: str, choice: int = 0) -> list[int]:
    """The tokens of one choice."""
    return [token for one in outputs if (one.request_id, one.choice) == (name, choice) for token in one.token_ids]


def run_alone(engine: EngineCore, one: EngineRequest, choice: int = 0) -> list[int]:
    """The tokens of a request that has the engine for itself."""
    engine.add(one)
    return ids_of(drain(engine), one.request_id, choice)


def assert_empty(engine: Any) -> None:
    """Nothing is left of any request in a torch engine."""
    assert not engine.has_work()
    assert engine.stats.num_running == engine.stats.num_waiting == engine.stats.kv_cache_used_tokens == 0
    assert not engine._requests
    assert not engine._prompt_logprobs
    assert not engine._sampler._guides
    assert not engine._sampler._penalties._row_of
