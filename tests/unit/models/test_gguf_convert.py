"""A tiny synthetic GGUF becomes a Hugging Face folder with the same numbers and the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from tests.unit.models.conftest import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, SPECIAL_TOKENS, TOKENS, WriteGguf
from tokservice.models.gguf_convert import UnsupportedGguf, convert, hf_name, unpermute


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    path.mkdir()
    return path


def test_every_tensor_arrives_under_its_name_rounded_to_float16(write_gguf: WriteGguf, folder: Path) -> None:
    gguf = write_gguf()
    convert(gguf.path, folder)
    weights = load_file(folder / "model.safetensors")
    assert set(weights) == {hf_name(name) for name in gguf.tensors}
    assert all(weight.dtype == np.float16 for weight in weights.values())
    for name, values in gguf.tensors.items():
        if ".attn_q." in name:
            values = unpermute(values, NUM_HEADS)
        elif ".attn_k." in name:
            values = unpermute(values, NUM_KV_HEADS)
        np.testing.assert_array_equal(weights[hf_name(name)], values.astype(np.float16), err_msg=name)


def _rotate(pairs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Rotary embedding at one position of (num_heads, head_dim // 2, 2): pair i turns by its own angle."""
    angle = 3.0 / 100000.0 ** (np.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
    first, second = pairs[..., 0], pairs[..., 1]
    turned = (first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle))
    return np.stack(turned, axis=-1).astype(np.float32)


def test_unpermuted_rows_give_the_same_rotated_numbers_in_the_other_layout() -> None:
    """Skipped or inverted permutation: the model loads and speaks nonsense."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((NUM_HEADS * HEAD_DIM, 16)).astype(np.float32)
    hidden = rng.standard_normal(16).astype(np.float32)
    side_by_side = (rows @ hidden).reshape(NUM_HEADS, HEAD_DIM // 2, 2)
    half_apart = (unpermute(rows, NUM_HEADS) @ hidden).reshape(NUM_HEADS, 2, HEAD_DIM // 2)
    np.testing.assert_allclose(_rotate(half_apart.swapaxes(1, 2)), _rotate(side_by_side), rtol=1e-5, atol=1e-5)
    assert not np.array_equal(unpermute(rows, NUM_HEADS), rows)


def test_config_states_what_the_gguf_states(write_gguf: WriteGguf, folder: Path) -> None:
    convert(write_gguf().path, folder)
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-05,
        "vocab_size": len(TOKENS),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float16",
    }
    assert {key: config[key] for key in expected} == expected
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_tied_just_where_there_is_no_output_matrix(
    write_gguf: WriteGguf, folder: Path, tied: bool
) -> None:
    convert(write_gguf(tied=tied).path, folder)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is not tied


def test_tokenizer_merges_splits_digits_and_keeps_control_tokens_whole(write_gguf: WriteGguf, folder: Path) -> None:
    convert(write_gguf().path, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = tokenizer.encode("hello hello 123<|im_end|>")
    assert encoded.tokens == ["hello", "Ġhello", "Ġ", "1", "2", "3", "<|im_end|>"]
    assert encoded.ids == [TOKENS.index(token) for token in encoded.tokens]
    assert tokenizer.decode(encoded.ids) == "hello hello 123"
    added = tokenizer.get_added_tokens_decoder()
    assert {token_id: token.content for token_id, token in added.items()} == dict(enumerate(SPECIAL_TOKENS))
    assert all(token.special and not token.normalized for token in added.values())


@pytest.mark.parametrize("text", ["naïve 🙂 日本語", "  two\n\n\tblanks ", "\x00\x7f\u0604", "don't x1y22"])
def test_any_text_survives_encoding_and_decoding(write_gguf: WriteGguf, folder: Path, text: str) -> None:
    convert(write_gguf().path, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_chat_template_and_special_tokens_are_named(write_gguf: WriteGguf, folder: Path) -> None:
    convert(write_gguf().path, folder)
    assert "message['content']" in (folder / "chat_template.jinja").read_text()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"  # GPT2Tokenizer would drop the Digits step
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == ("<|im_start|>", "<|im_end|>", False)


@pytest.mark.parametrize(
    ("change", "named"), [({"architecture": "qwen2"}, "qwen2"), ({"pre": "llama-bpe"}, "llama-bpe")]
)
def test_other_kinds_are_refused_by_name(
    write_gguf: WriteGguf, folder: Path, change: dict[str, str], named: str
) -> None:
    with pytest.raises(UnsupportedGguf, match=named):
        convert(write_gguf(**change).path, folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_freqs.weight", "blk.0"])
def test_unknown_tensors_are_refused_not_dropped(name: str) -> None:
    with pytest.raises(UnsupportedGguf, match=name):
        hf_name(name)
