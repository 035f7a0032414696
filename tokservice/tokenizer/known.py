"""What was found out about a tokenizer.json, kept in the user's cache so that a start need not find out again.

Tokenizer worker, at start-up. A record counts for one file, by its digest, and for one version of everything that had
a say in it. The cache only saves time: a record that cannot be read or written is as good as none.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import orjson

from tokservice.runtime.cache_dir import cache_dir
from tokservice.tokenizer import self_test
from tokservice.tokenizer.length_guard import max_chars_per_token
from tokservice.wire.errors import StartupError

_VERSION = 1  # of this record and of what ``examine`` finds out

log = logging.getLogger(__name__)


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a tokenizer."""

    size: int  # one more than the highest token id of the file
    max_chars_per_token: int | None  # None: no bound is known
    unk_id: int | None  # what the model makes of text that it does not know; None: it knows all text
    difference: str | None = None  # of fastokens from the reference; empty: none; None: never looked for


def recall(file: bytes) -> tuple[Known, Path]:
    """What is known of a tokenizer.json, examined now if need be, and where to ``remember`` more of it.

    Raises StartupError, with the reason alone, if the file makes no sense.
    """
    path = cache_dir() / "tokenizers-known" / f"{_key(file)}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Known), path
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        facts = _examine(file)
        remember(facts, path)
        return facts, path


def remember(known: Known, path: Path) -> None:
    """For later starts. Written at once, so that no reader finds half of it."""
    scratch = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(msgspec.json.encode(known))
        scratch.replace(path)
    except OSError as error:
        log.debug("not remembered: %s", error)


def _examine(file: bytes) -> Known:
    try:
        tokenizer = orjson.loads(file)
        vocab = tokenizer["model"]["vocab"]
        highest = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
        added = max((token["id"] for token in tokenizer.get("added_tokens") or ()), default=-1)
        return Known(1 + max(highest, added), max_chars_per_token(tokenizer), _unk_id(tokenizer["model"]))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise StartupError(f"{type(error).__name__}: {str(error)[:200]}") from error


def _unk_id(model: dict[str, Any]) -> int | None:
    token = model.get("unk_token")
    return model["vocab"].get(token) if token is not None else model.get("unk_id")  # by content, or in Unigram by id


def _key(file: bytes) -> str:
    digest = hashlib.sha256(file)
    for part in (_VERSION, self_test.VERSION, platform.machine(), *map(_version, ("tokenizers", "fastokens"))):
        digest.update(f"|{part}".encode())
    return digest.hexdigest()


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"
