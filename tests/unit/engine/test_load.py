"""Choosing a core, and the one clear line where none can be built."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.load import build_core
from engine.model_files import eos_token_ids, vocab_size
from tests.helpers.tiny_models import save_tiny_model
from tokservice.runtime.config import from_dict
from tokservice.wire.errors import StartupError

SIMULATED = from_dict({"engine": {"kind": "simulated"}, "model": {"max_model_len": 64}})


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value))


def test_simulated_takes_its_sizes_from_config_json(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"vocab_size": 500, "eos_token_id": 7})
    write(tmp_path, "generation_config.json", {"eos_token_id": [7, 9]})
    limits = build_core(SIMULATED, tmp_path).limits
    assert (limits.vocab_size, limits.eos_token_ids, limits.max_model_len) == (500, (7, 9), 64)


@pytest.mark.parametrize(
    ("config", "generation_config", "ids"),
    [(7, None, (7,)), ([7, 3], 9, (3, 7, 9)), (None, [4], (4,)), ([7, None, 500, -1], [10**9, 7], (7,)), (500, [], ())],
)
def test_eos_ids_of_both_files_that_the_vocabulary_has(
    tmp_path: Path, config: object, generation_config: object, ids: tuple[int, ...]
) -> None:
    """An eos id beyond the logits, masked because of min_tokens, has ended whole engines."""
    write(tmp_path, "config.json", {"vocab_size": 500, "eos_token_id": config})
    write(tmp_path, "generation_config.json", {"eos_token_id": generation_config})
    assert build_core(SIMULATED, tmp_path).limits.eos_token_ids == ids


@pytest.mark.parametrize("eos", ["<end>", {"content": "<end>"}, "b", "<other>", None])
def test_the_tokenizers_eos_ends_a_sequence_too(tmp_path: Path, eos: object) -> None:
    """Models tuned for chats name the end of a turn there alone, and answers went on to the limit: mlx-vlm#2112,
    Qwen3#927.
    """
    write(tmp_path, "config.json", {"vocab_size": 500, "eos_token_id": 7})
    write(tmp_path, "tokenizer_config.json", {"eos_token": eos})
    added = [{"id": 12, "content": "<end>"}]
    write(tmp_path, "tokenizer.json", {"model": {"vocab": {"a": 0, "b": 10}}, "added_tokens": added})
    named = {"<end>": {12}, "b": {10}}.get(eos["content"] if isinstance(eos, dict) else str(eos), set())
    assert set(eos_token_ids(tmp_path, 500)) == {7} | named
    assert eos_token_ids(tmp_path, 9) == (7,)


def test_vocabulary_of_a_tokenizer_alone(tmp_path: Path) -> None:
    added = [{"id": 12, "content": "<end>"}]
    write(tmp_path, "tokenizer.json", {"model": {"vocab": {"a": 0, "b": 10}}, "added_tokens": added})
    assert vocab_size(tmp_path) == 13
    assert eos_token_ids(tmp_path, 13) == ()
    write(tmp_path, "tokenizer.json", {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}})
    assert vocab_size(tmp_path) == 2


def test_faults_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="vocabulary size"):
        build_core(SIMULATED, tmp_path)
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(StartupError, match=r"config\.json") as caught:
        build_core(SIMULATED, tmp_path)
    assert "\n" not in str(caught.value)


def test_simulated_engine_never_imports_torch() -> None:
    code = "import sys, engine.load, engine.simulated; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_start_does_not_import_torch_s_compiler(tmp_path: Path) -> None:
    """It took two of the six seconds of every start, so that a few operations could be watched."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from pathlib import Path\n"
        "from tests.helpers.tiny_models import drain, make_engine, request\n"
        "engine = make_engine(Path(sys.argv[1]))\n"
        "engine.add(request('r', [5], max_tokens=2))\n"
        "assert drain(engine)\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, str(save_tiny_model("llama3", tmp_path))]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0


def test_a_start_tells_what_takes_long(tmp_path: Path) -> None:
    """Of models that load for minutes operators saw nothing at all."""
    told: list[str] = []
    config = from_dict({"engine": {"kv_cache_tokens": 256}})
    build_core(config, save_tiny_model("llama3", tmp_path), told.append)
    assert [line for line in told if "kernels" not in line] == ["loading weights: 0 %", "warming up"]
