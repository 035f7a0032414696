"""Reads the small files of a model's folder. Tokenizer worker, at start-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from tokservice.wire.errors import StartupError


def read_text(path: Path) -> str:
    """A UTF-8 file. Raises StartupError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StartupError(f"{path} is not UTF-8: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where the file does not exist. Raises StartupError."""
    if not path.exists():
        return {}
    try:
        value = orjson.loads(read_text(path))
    except orjson.JSONDecodeError as error:
        raise StartupError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} must hold a JSON object")
    return value
