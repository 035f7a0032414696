"""Folders of npm packages in the user's cache, installed once from a lock of exact versions and digests."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tokservice.runtime.cache_dir import cache_dir

CACHE = cache_dir() / "npm"  # the user's own, whatever a test makes of the environment later
FILES = ("package.json", "package-lock.json")
NPM_TIMEOUT_S = 120
NO_NETWORK = re.compile("ENOTFOUND|EAI_AGAIN|ECONN|ETIMEDOUT|ERR_SOCKET|network")


def node() -> str:
    """The path of node. Skips the test where there is none."""
    found = shutil.which("node")
    if found is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    return found


def npm_folder(source: Path) -> Path:
    """A folder with the node_modules that ``source``/package-lock.json names. Skips where there is no network."""
    digest = hashlib.sha256(b"".join((source / name).read_bytes() for name in FILES)).hexdigest()
    folder = CACHE / digest[:16]
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        made = Path(work) / "made"
        made.mkdir()
        for name in FILES:
            shutil.copy(source / name, made)
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=made, capture_output=True, text=True, timeout=NPM_TIMEOUT_S, check=False)
        if NO_NETWORK.search(done.stderr):
            pytest.skip(f"the packages cannot be fetched from npm: {done.stderr[-500:]}")
        assert done.returncode == 0, done.stderr
        try:
            made.rename(folder)  # at once: a second process that installs it too never sees a half of it
        except OSError:
            assert folder.is_dir()
    return folder
