"""The JSON files of a model folder, as far as an engine needs them.

Engine process; imports no torch. Weights are read in ``torch_core/weights.py``, templates and vocabularies by the
tokenizer workers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokservice.wire.errors import StartupError


def read_json(model_dir: Path, name: str, required: bool = False) -> dict[str, Any]:
    """The object in a file of the model folder; {} where there is no such file. Raises StartupError."""
    path = model_dir / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise StartupError(f"{model_dir} has no {name}: it is not a model folder in Hugging Face layout") from None
        return {}
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} holds no JSON object")
    return value


def eos_token_ids(model_dir: Path, vocab_size: int) -> tuple[int, ...]:
    """Ids that end a sequence, by config.json and generation_config.json (each an int or a list) and by the tokenizer.

    All of them, since each may lack the one that ends a turn: models that were tuned for chats name it in
    tokenizer_config.json alone, and would write on to the limit. Some models name ids that they do not have: nothing
    may index logits by those.
    """
    ids: list[object] = [_tokenizer_eos_id(model_dir)]
    for name in ("config.json", "generation_config.json"):
        value = read_json(model_dir, name).get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    return tuple(sorted({token for token in ids if isinstance(token, int) and 0 <= token < vocab_size}))


def vocab_size(model_dir: Path) -> int:
    """Number of token ids: config.json's, else that of tokenizer.json. Raises StartupError."""
    stated = read_json(model_dir, "config.json").get("vocab_size")
    size = stated if isinstance(stated, int) and stated > 0 else num_token_ids(model_dir)
    if not size:
        raise StartupError(f"{model_dir} states no vocabulary size: neither config.json nor tokenizer.json has one")
    return size


def num_token_ids(model_dir: Path) -> int:
    """One above the highest id that tokenizer.json has a token for; 0 where there is none. Raises StartupError."""
    return 1 + max(_token_ids(model_dir).values(), default=-1)


def _tokenizer_eos_id(model_dir: Path) -> int | None:
    """Id of the ``eos_token`` of tokenizer_config.json; None where there is none, or the vocabulary lacks it."""
    eos = read_json(model_dir, "tokenizer_config.json").get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    return _token_ids(model_dir).get(text) if text else None


def _token_ids(model_dir: Path) -> dict[str, int]:
    """Every token of tokenizer.json, and its id."""
    tokenizer = read_json(model_dir, "tokenizer.json")
    try:
        vocabulary = tokenizer.get("model", {}).get("vocab", {})
        if isinstance(vocabulary, list):  # Unigram: [token, score] in the order of ids; else a mapping
            vocabulary = {entry[0]: token_id for token_id, entry in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
        return {token: int(token_id) for token, token_id in (vocabulary | added).items()}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise StartupError(f"{model_dir / 'tokenizer.json'} has an unexpected form: {error!r}") from error
