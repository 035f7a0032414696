from __future__ import annotations

import json
import logging
from array import array
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.helpers import tiny_tokenizers
from tokservice.runtime.cache_dir import cache_dir
from tokservice.tokenizer import backend_choice, self_test
from tokservice.tokenizer.fastokens_backend import FastokensBackend
from tokservice.tokenizer.hf_backend import HuggingFaceBackend
from tokservice.wire.errors import StartupError


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_tokenizers.write_model(tmp_path / "model", tiny_tokenizers.byte_level())


class Panic(BaseException):
    """As a panic of a Rust library arrives in Python: no Exception."""


def must_not_be_called(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError("called")


def test_auto_takes_the_fast_one_once_proven_and_then_needs_no_reference(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = backend_choice.choose(model, "auto")
    assert first.backend.name == "fastokens"
    assert first.reason == "equal to the reference"
    monkeypatch.setattr(HuggingFaceBackend, "__init__", must_not_be_called)
    monkeypatch.setattr(self_test, "first_difference", must_not_be_called)
    second = backend_choice.choose(model, "auto")
    assert second.backend.name == "fastokens"
    assert second.reason == "equal to the reference (remembered)"
    assert second.known == first.known
    assert [record.message.partition(" start_s")[0] for record in caplog.records] == [
        "tokenizer backend=fastokens reason='equal to the reference'",
        "tokenizer backend=fastokens reason='equal to the reference (remembered)'",
    ]


@pytest.mark.parametrize("only", ["special_as_text", "add_special_tokens", "long", "decode", "token"])
def test_auto_falls_back_on_any_difference_and_remembers_it(
    model: Path, only: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = FastokensBackend.encode

    def wrong(self: FastokensBackend, text: str, **options: bool) -> Any:
        ids = encode(self, text, **options)
        differs = len(text) > 30_000 if only == "long" else options.get(only)
        return ids + array("I", [0]) if differs else ids

    monkeypatch.setattr(FastokensBackend, "encode", wrong)
    if only == "decode":
        monkeypatch.setattr(FastokensBackend, "decode", lambda *_: "x")
    if only == "token":
        monkeypatch.setattr(FastokensBackend, "token", lambda *_: "x")
    choice = backend_choice.choose(model, "auto")
    assert choice.backend.name == "hf"
    assert "of the self-test" in choice.reason
    monkeypatch.setattr(FastokensBackend, "__init__", must_not_be_called)
    again = backend_choice.choose(model, "auto")
    assert again.backend.name == "hf"
    assert again.reason == f"{choice.reason} (remembered)"


@pytest.mark.parametrize("error", [ValueError("no such step"), Panic("at line 5"), ImportError("no module")])
def test_auto_falls_back_where_the_fast_one_cannot_load(
    model: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> NoReturn:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(FastokensBackend, "__init__", fail)
        choice = backend_choice.choose(model, "auto")
        assert choice.backend.name == "hf"
        assert choice.reason == f"fastokens cannot load tokenizer.json: {type(error).__name__}: {error}"
        with pytest.raises(StartupError, match="cannot load"):
            backend_choice.choose(model, "fastokens")
    assert backend_choice.choose(model, "auto").backend.name == "fastokens", "may be mended meanwhile: not remembered"


def test_auto_falls_back_where_the_fast_one_fails_in_the_test(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = FastokensBackend.encode

    def fail_on_nul(self: FastokensBackend, text: str, **options: bool) -> Any:
        if "\0" in text:
            raise Panic("at line 5")
        return encode(self, text, **options)

    monkeypatch.setattr(FastokensBackend, "encode", fail_on_nul)
    choice = backend_choice.choose(model, "auto")
    assert choice.backend.name == "hf"
    assert choice.reason == "fastokens has a failure in the self-test: fastokens failed: Panic: at line 5"
    assert backend_choice.choose(model, "auto").reason == f"{choice.reason} (remembered)"


def test_auto_finds_typed_special_tokens_that_become_the_tokens_themselves(tmp_path: Path) -> None:
    """As in fastokens 0.3.5 where the vocabulary has the token, but not all of its characters."""
    model = tiny_tokenizers.write_model(tmp_path / "model", tiny_tokenizers.byte_fallback())
    choice = backend_choice.choose(model, "auto")
    assert choice.backend.name == "hf"
    assert "fastokens has other token ids" in choice.reason


@pytest.mark.parametrize("wanted", ["hf", "fastokens"])
def test_a_back_end_can_be_demanded(model: Path, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "first_difference", must_not_be_called)
    assert backend_choice.choose(model, wanted).backend.name == wanted


@pytest.mark.parametrize("content", [b"", b"{", b'{"size": "5"}', b'{"size": 5}', b"\xff", b'{"sizes": 5}'])
def test_a_record_that_makes_no_sense_is_as_good_as_none(model: Path, content: bytes) -> None:
    expected = backend_choice.choose(model, "auto").known
    (record,) = (cache_dir() / "tokenizers-known").iterdir()
    record.write_bytes(content)
    assert backend_choice.choose(model, "auto").known == expected
    assert json.loads(record.read_bytes()) == {
        "size": tiny_tokenizers.byte_level().get_vocab_size(),
        "max_chars_per_token": expected.max_chars_per_token,
        "unk_id": None,
        "difference": "",
    }


def test_a_record_counts_for_one_file_and_one_pair_of_versions(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def reasons(folder: Path) -> list[str]:
        return [backend_choice.choose(folder, "auto").reason for _ in range(2)]

    fresh = ["equal to the reference", "equal to the reference (remembered)"]
    assert reasons(model) == fresh
    assert reasons(tiny_tokenizers.write_model(tmp_path / "other", tiny_tokenizers.byte_level_with_nfc())) == fresh
    monkeypatch.setattr("tokservice.tokenizer.known._version", lambda name: f"{name} 99")
    assert reasons(model) == fresh
    monkeypatch.setattr(self_test, "VERSION", 99)
    assert reasons(model) == fresh


def test_a_cache_that_cannot_be_written_is_no_failure(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert backend_choice.choose(model, "auto").backend.name == "fastokens"


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": 5}', "[]", '{"model": {"vocab": [5]}}', None])
def test_unreadable_files_are_startup_errors(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StartupError, match=r"cannot read .*tokenizer\.json"):
        backend_choice.choose(tmp_path, "auto")


def test_the_self_test_has_some_200_texts() -> None:
    texts = self_test.texts(["<a>", "<b>"])
    assert len(set(texts)) == len(texts) >= 200
    assert any("\x00" in text for text in texts)
    assert any("<a><a>" in text for text in texts)
    assert len(self_test.texts([f"<{i}>" for i in range(7000)])) < 300
