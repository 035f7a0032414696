from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tokservice.cli import API_KEY_VARIABLE, _api_keys
from tokservice.wire.errors import ConfigError

NONE = argparse.Namespace(api_key=[], api_key_file=None)


def test_keys_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("three\nfour\n")
    monkeypatch.setenv(API_KEY_VARIABLE, "two")
    assert _api_keys(argparse.Namespace(api_key=["one"], api_key_file=file)) == ["one", "two", "three", "four"]
    assert _api_keys(NONE) == []


@pytest.mark.parametrize("value", ["", " ", "\n"])
def test_a_variable_that_was_left_empty_does_not_open_the_server(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret that was never filled in switched the check off, without a word: of the kind of LITELLM_MASTER_KEY in
    Osmantic/ODS#602.
    """
    monkeypatch.setenv(API_KEY_VARIABLE, value)
    with pytest.raises(ConfigError, match="holds no key"):
        _api_keys(NONE)


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "cl\xe9"])
def test_a_key_that_no_client_could_send_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="printable ASCII"):
        _api_keys(argparse.Namespace(api_key=[key], api_key_file=None))
