"""What --model may name, and what the operator reads when it names nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest

from tokservice.models import default_model
from tokservice.models.resolve import resolve_model, served_name
from tokservice.runtime.config import DEFAULT_MODEL
from tokservice.wire.errors import ConfigError, StartupError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "my-model"
    path.mkdir()
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def test_the_default_name_is_fetched(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(default_model, "ensure_default_model", lambda: folder)
    assert resolve_model(DEFAULT_MODEL) == folder


def test_a_folder_needs_no_more_than_its_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve_model("my-model") == folder
    assert resolve_model("./my-model/") == folder
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_model("~/my-model") == folder


def test_an_existing_folder_wins_over_a_hub_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent.parent)
    assert resolve_model(f"{folder.parent.name}/{folder.name}") == folder


NOTHING = [
    "no-such-model",
    "/no/such/folder",
    "./org/name",
    "org/name/more",
    "org/..",
    "",
    "~nobody/x",
    "a" * 5000,
    "\0",
]


@pytest.mark.parametrize("path", NOTHING)
def test_neither_folder_nor_id_says_what_was_tried(path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^model\.path: ") as caught:
        resolve_model(path)
    assert "\n" not in str(caught.value)


def test_a_file_and_a_folder_without_tokenizer_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model(str(tmp_path / "weights.gguf"))
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        resolve_model(str(tmp_path))


def test_a_hub_id_is_fetched_without_duplicates_of_the_weights(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    repository = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "consolidated.safetensors",
        "original/consolidated.00.pth",
        "onnx/model.onnx",
        "onnx/config.json",
        "original/tokenizer.model",
        "tokenizer/tokenizer.json",
        "pytorch_model.bin",
        "README.md",
    ]
    fetched: list[str] = []

    def snapshot(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        filtered = huggingface_hub.utils.filter_repo_objects(  # type: ignore[attr-defined]
            repository, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        fetched.extend([repo_id, *filtered])
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("org/name-1.5_b") == folder
    assert fetched == ["org/name-1.5_b", *repository[:8]]


def test_the_hub_out_of_reach_is_one_line() -> None:
    with pytest.raises(StartupError, match=r"model\.path: no folder org/name here, .*HF_HUB_OFFLINE") as caught:
        resolve_model("org/name")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_served_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert served_name(DEFAULT_MODEL) == DEFAULT_MODEL
    assert served_name("org/name") == "org/name"
    assert served_name(str(folder)) == served_name(f"{folder}/") == served_name(".") == "my-model"
    assert served_name(str(folder), "mine") == "mine"


def test_importing_resolve_loads_nothing_heavy() -> None:
    """The launcher imports it on every start."""
    code = "import sys, tokservice.models.resolve; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "tokservice.models.default_model" in loaded
    assert not {"numpy", "gguf", "tokenizers", "safetensors", "huggingface_hub", "tqdm", "torch"} & set(loaded)
