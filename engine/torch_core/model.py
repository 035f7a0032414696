"""The forward pass of a decoder, from token ids to logits.

Engine process. What can be done once is done at load:

* The dimensions of each q and k head are reordered so that a rotary pair is adjacent, which makes the rotation a
  complex product in place. Attention does not notice: both sides of its scalar product are reordered alike.
* q, k and v are one matrix; gate and up are packed together (``linear.pack_gate``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.torch_core.batch import StepBatch
from engine.torch_core.kernels.calls import Kernels
from engine.torch_core.linear import Linear, input_dtype, pack_gate, pack_head, pack_linear
from engine.torch_core.model_spec import ModelSpec
from engine.torch_core.row_ops import CompiledRowOps, RowOps, TorchRowOps
from engine.torch_core.weights import Checkpoint


class Attention(Protocol):
    """The KV cache of all layers, and attention over it."""

    def begin(self, batch: StepBatch) -> None:
        """Prepare for a step's rows."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store the rows' keys and values, then attend: (num_rows, heads, head_dim) each, rotated.

        Returns (num_rows, num_heads * head_dim).
        """


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor  # (hidden_size,)
    qkv: Linear
    q_norm: Tensor | None  # (head_dim,), reordered as the heads are
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    gate: Linear  # silu(gate) * up
    down: Linear


class Model:
    """Weights on one device. Not a module: nothing here is trained."""

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        *,
        weight_format: str,
        device: torch.device,
        dtype: torch.dtype,
        max_len: int,
        kernels: Kernels | None = None,
        progress: Callable[[range], Iterable[int]] = iter,
    ) -> None:
        """Load and pack; ``weight_format`` is one of ``linear.CPU_FORMATS`` or "plain", ``dtype`` that of activations.
        ``kernels`` are for a CPU and activations in float32, where they are faster than torch.

        Raises StartupError where a tensor is missing, or not what config.json says.
        """
        self.spec = spec
        self._ops: RowOps
        if kernels is None:
            self._ops = TorchRowOps(spec, max_len, device)
        else:
            self._ops = CompiledRowOps(spec, max_len, kernels, input_dtype(weight_format, kernels))
        load = _Loader(spec, checkpoint, kernels, weight_format, device, dtype)
        self._dtype = dtype
        embeddings = load.stored("model.embed_tokens.weight")
        self._embeddings = embeddings.to(device)  # as stored: rows are converted when they are read
        self._layers = [load.layer(index) for index in progress(range(spec.num_layers))]
        head = embeddings if spec.tied_embeddings else load.stored("lm_head.weight")
        self._norm = load.tensor("model.norm.weight")
        self._head = load.head(head)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states (num_rows, hidden_size) of token ids (num_rows,) int64, before the last norm."""
        x = self.embed(token_ids)
        return x.add_(self.layers(x, positions, attention))

    def embed(self, token_ids: Tensor) -> Tensor:
        """What the first layer reads, (num_rows, hidden_size), of token ids (num_rows,) int64."""
        return self._embeddings.index_select(0, token_ids).to(self._dtype)

    def layers(self, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """All layers; each adds its result to x, but for the last one's, which is returned."""
        spec, ops = self.spec, self._ops
        num_q, num_k = spec.num_heads, spec.num_kv_heads
        ops.begin(positions)
        delta = None  # what the last layer adds to x
        for index, layer in enumerate(self._layers):
            ops.begin_layer()
            qkv = layer.qkv(ops.norm(x, layer.input_norm, delta)).to(self._dtype)
            qkv = qkv.view(-1, num_q + 2 * num_k, spec.head_dim)
            ops.rotate(qkv, layer.q_norm, layer.k_norm)
            query, key, value = qkv.split_with_sizes((num_q, num_k, num_k), 1)
            delta = layer.o(attention(index, query, key, value))
            delta = layer.down(layer.gate(ops.norm(x, layer.post_norm, delta)))
        assert delta is not None  # ``read_spec`` refuses a model without layers
        return delta

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (num_rows, vocab_size) float32 of hidden states."""
        return self._head(self._ops.norm(hidden, self._norm)).float()


class _Loader:
    """Reads one layer after the other, so that unpacked weights never exist all at once."""

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        kernels: Kernels | None,
        weight_format: str,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._spec = spec
        self._kernels = kernels
        self._checkpoint = checkpoint
        self._format = weight_format
        self._device = device
        self._dtype = dtype
        heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._shapes = {
            "embed_tokens": (spec.vocab_size, spec.hidden_size),
            "lm_head": (spec.vocab_size, spec.hidden_size),
            "q_proj": (heads, spec.hidden_size),
            "k_proj": (kv_heads, spec.hidden_size),
            "v_proj": (kv_heads, spec.hidden_size),
            "o_proj": (spec.hidden_size, heads),
            "gate_proj": (spec.intermediate_size, spec.hidden_size),
            "up_proj": (spec.intermediate_size, spec.hidden_size),
            "down_proj": (spec.hidden_size, spec.intermediate_size),
            "q_norm": (spec.head_dim,),
            "k_norm": (spec.head_dim,),
        }

    def tensor(self, name: str) -> Tensor:
        return self.stored(name).to(self._device, self._dtype)

    def stored(self, name: str) -> Tensor:
        """As it is stored."""
        *_, part, kind = name.split(".")
        shape = self._shapes.get(part, (self._spec.hidden_size,))  # the other norms
        return self._checkpoint.tensor(name, shape[:1] if kind == "bias" else shape)

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        weight = weight.to(self._device, self._dtype).contiguous()
        bias = None if bias is None else bias.to(self._device, self._dtype)
        return pack_linear(weight, bias, self._format, self._kernels)

    def head(self, weight: Tensor) -> Linear:
        return pack_head(weight.to(self._device, self._dtype), self._format, self._kernels)

    def layer(self, index: int) -> _Layer:
        spec = self._spec
        prefix = f"model.layers.{index}."
        norms = [f"{prefix}self_attn.{name}_norm.weight" for name in "qk"] if spec.qk_norm else []
        q_norm, k_norm = (_adjacent_pairs(self.tensor(name), 1) for name in norms) if norms else (None, None)
        return _Layer(
            input_norm=self.tensor(f"{prefix}input_layernorm.weight"),
            qkv=self._joined([f"{prefix}self_attn.{name}_proj" for name in "qkv"], spec.qkv_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            o=self._joined([f"{prefix}self_attn.o_proj"], spec.o_bias),
            post_norm=self.tensor(f"{prefix}post_attention_layernorm.weight"),
            gate=self._gate(f"{prefix}mlp."),
            down=self._joined([f"{prefix}mlp.down_proj"], spec.mlp_bias),
        )

    def _joined(self, names: list[str], has_bias: bool) -> Linear:
        weight = torch.cat([self._reorder(name, self.stored(f"{name}.weight")) for name in names])
        biases = [self._reorder(name, self.stored(f"{name}.bias")) for name in names] if has_bias else []
        return self.pack(weight, torch.cat(biases) if biases else None)

    def _gate(self, prefix: str) -> Linear:
        names = [f"{prefix}{name}_proj" for name in ("gate", "up")]
        gate, up = (self.tensor(f"{name}.weight") for name in names)
        biases = [self.tensor(f"{name}.bias") for name in names] if self._spec.mlp_bias else []
        pair = (biases[0], biases[1]) if biases else None
        return pack_gate(gate, up, pair, self._format, self._kernels)

    def _reorder(self, name: str, tensor: Tensor) -> Tensor:
        if name.endswith("q_proj"):
            return _adjacent_pairs(tensor, self._spec.num_heads)
        return _adjacent_pairs(tensor, self._spec.num_kv_heads) if name.endswith("k_proj") else tensor


def _adjacent_pairs(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from (first halves, second halves) to (pair after pair)."""
    half = len(tensor) // num_heads // 2
    return tensor.view(num_heads, 2, half, -1).transpose(1, 2).reshape(tensor.shape)
