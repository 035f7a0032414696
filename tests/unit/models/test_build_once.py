"""A built folder is whole or absent, whatever interrupts its builder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokservice.models.build_once import SEAL, build_once, is_sealed

FINGERPRINT = "format 1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "model"


class Builder:
    """Writes two files and counts how often it was asked to."""

    def __init__(self, content: str = "weights") -> None:
        self.content = content
        self.calls = 0

    def __call__(self, new: Path, scratch: Path) -> None:
        self.calls += 1
        (scratch / "download").write_text("raw")
        (new / "config.json").write_text("{}")
        (new / "weights").write_text(self.content)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_builds_the_first_time_only(folder: Path) -> None:
    builder = Builder()
    for _ in range(3):
        build_once(folder, FINGERPRINT, builder)
    assert builder.calls == 1
    assert _names(folder) == {"config.json", "weights", SEAL}
    assert _names(folder.parent) == {"model", ".model.lock"}


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("usual_umask")
def test_files_are_readable_by_other_users(folder: Path) -> None:
    """The safetensors library creates its files for the owner alone; a container may run as another user."""

    def build(new: Path, scratch: Path) -> None:
        (new / "weights").touch(mode=0o600)

    build_once(folder, FINGERPRINT, build)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert (folder / "weights").stat().st_mode & 0o777 == 0o644


def test_another_fingerprint_builds_again_and_replaces(folder: Path) -> None:
    build_once(folder, "format 1", Builder("old"))
    (folder / "stale").touch()
    build_once(folder, "format 2", Builder("new"))
    assert (folder / "weights").read_text() == "new"
    assert _names(folder) == {"config.json", "weights", SEAL}


def _truncate(folder: Path) -> None:
    os.truncate(folder / "weights", 3)


def _remove(folder: Path) -> None:
    (folder / "config.json").unlink()


def _empty_seal(folder: Path) -> None:
    (folder / SEAL).write_text("")


@pytest.mark.parametrize("damage", [_truncate, _remove, _empty_seal])
def test_a_damaged_folder_is_built_again(folder: Path, damage: object) -> None:
    assert callable(damage)
    build_once(folder, FINGERPRINT, Builder())
    damage(folder)
    builder = Builder()
    build_once(folder, FINGERPRINT, builder)
    assert builder.calls == 1
    assert is_sealed(folder, FINGERPRINT)


@pytest.mark.parametrize(
    "seal", [None, [], 7, {}, {"fingerprint": FINGERPRINT}, {"sizes": 3}, {"sizes": {"a/../..": 1}}]
)
def test_no_content_of_the_seal_is_more_than_unsealed(folder: Path, seal: object) -> None:
    folder.mkdir(parents=True)
    (folder / SEAL).write_text(json.dumps(seal))
    assert not is_sealed(folder, FINGERPRINT)


def test_a_failed_build_leaves_nothing_and_the_next_one_works(folder: Path) -> None:
    def fail(new: Path, scratch: Path) -> None:
        Builder()(new, scratch)
        raise RuntimeError("no network")

    with pytest.raises(RuntimeError, match="no network"):
        build_once(folder, FINGERPRINT, fail)
    assert _names(folder.parent) == {".model.lock"}
    build_once(folder, FINGERPRINT, Builder())
    assert is_sealed(folder, FINGERPRINT)


def test_a_failed_rebuild_keeps_the_old_folder(folder: Path) -> None:
    def fail(new: Path, scratch: Path) -> None:
        raise RuntimeError("no network")

    build_once(folder, "format 1", Builder("old"))
    with pytest.raises(RuntimeError, match="no network"):
        build_once(folder, "format 2", fail)
    assert is_sealed(folder, "format 1")


def test_concurrent_builders_build_once(folder: Path) -> None:
    """Two first starts at the same time, each writing the other's half-made files."""
    started, proceed = threading.Event(), threading.Event()
    builder = Builder()

    def slow(new: Path, scratch: Path) -> None:
        started.set()
        assert proceed.wait(timeout=20)
        builder(new, scratch)

    threads = [threading.Thread(target=build_once, args=(folder, FINGERPRINT, slow)) for _ in range(3)]
    threads[0].start()
    assert started.wait(timeout=20)
    for thread in threads[1:]:
        thread.start()
    proceed.set()
    for thread in threads:
        thread.join(timeout=20)
    assert builder.calls == 1
    assert is_sealed(folder, FINGERPRINT)
    assert _names(folder.parent) == {"model", ".model.lock"}


STUCK_BUILDER = """
import sys, time
from pathlib import Path
from tokservice.models.build_once import build_once
def build(new, scratch):
    (scratch / "download").write_text("half")
    (new / "weights").write_text("half")
    print("inside", flush=True)
    time.sleep(600)
build_once(Path(sys.argv[1]), "format 1", build)
"""


def test_sigkill_in_the_middle_leaves_nothing_that_is_trusted_and_is_cleaned(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK_BUILDER, str(folder)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"inside\n"
        process.send_signal(signal.SIGKILL)
    assert not folder.exists()
    assert len(_names(folder.parent)) == 2  # the lock file and the remains

    build_once(folder, FINGERPRINT, Builder())
    assert (folder / "weights").read_text() == "weights"
    assert _names(folder.parent) == {"model", ".model.lock"}
