"""The private folder of a run."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokservice.runtime import run_dir
from tokservice.runtime.run_dir import PREFIX, run_directory
from tokservice.wire.channels import ipc_endpoint
from tokservice.wire.errors import ConfigError


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files: short, and of this test alone."""
    with tempfile.TemporaryDirectory(prefix="ts", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_a_new_one_is_private_and_gone_afterwards(base: Path) -> None:
    with run_directory("") as path:
        assert path.parent == base
        assert path.name.startswith(PREFIX)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "api.0.1").touch()
    assert list(base.iterdir()) == []


def test_it_goes_even_when_the_start_fails(base: Path) -> None:
    """It stayed behind whenever a process could not start."""
    with pytest.raises(ValueError, match="cannot start"), run_directory(""):
        raise ValueError("cannot start")
    assert list(base.iterdir()) == []


def test_two_servers_never_share(base: Path) -> None:
    """Two servers on a host took over each other's sockets: smg#2076."""
    with run_directory("") as first, run_directory("") as second:
        assert first != second
        assert first.is_dir()
    assert list(base.iterdir()) == []


def _left_by_a_killed_run(base: Path) -> Path:
    code = (
        "import os, sys\n"
        "from tokservice.runtime.run_dir import run_directory\n"
        "context = run_directory(sys.argv[1])\n"
        "print(context.__enter__(), flush=True)\n"
        "os._exit(9)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, ""],
        env={**os.environ, "TMPDIR": str(base), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        check=False,
    )
    path = Path(result.stdout.decode().strip())
    assert path.is_dir()
    return path


def test_the_folder_of_a_killed_run_is_removed_by_the_next(base: Path) -> None:
    """The sockets of a dead run were in the way of the next: smg#2076."""
    stale = _left_by_a_killed_run(base)
    (stale / "supervisor").touch()
    with run_directory(""):
        assert not stale.exists()


def test_the_folder_of_a_living_run_is_left_alone(base: Path) -> None:
    with run_directory("") as living:
        with run_directory(""):
            assert living.is_dir()
        assert (living / "owner").exists()


def test_a_folder_that_is_just_being_made_is_left_alone(base: Path) -> None:
    """Between making the folder and locking its owner's file another start took it for a stale one."""
    half_made = base / f"{PREFIX}new"
    half_made.mkdir()
    (half_made / "owner.new").touch()
    with run_directory(""):
        assert half_made.is_dir()


def test_what_is_not_ours_is_left_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = base / "precious"
    target.mkdir()
    (target / "owner").touch()
    (base / f"{PREFIX}link").symlink_to(target)
    (base / f"{PREFIX}file").touch()
    stale = _left_by_a_killed_run(base)
    real = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: real + 1)  # now nothing belongs to us
    with run_directory(""):
        assert target.is_dir()
        assert stale.is_dir()


def test_a_long_path_for_temporary_files_is_not_used(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Socket paths are limited to 107 bytes, and such a TMPDIR ended the start with a bare error."""
    long = base / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with run_directory("") as path:
        assert path.parent == Path("/tmp")
        ipc_endpoint(path, "detokenizer.63.999999.out")
    assert list(long.iterdir()) == []


def test_a_given_one_is_used(base: Path) -> None:
    wanted = base / "a" / "run"
    with run_directory(str(wanted)) as path:
        assert path == wanted
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert not wanted.exists()


def test_a_given_one_in_use_is_refused(base: Path) -> None:
    wanted = str(base / "run")
    with run_directory(wanted) as path:
        with pytest.raises(ConfigError, match="is in use by another server"), run_directory(wanted):
            pass
        assert path.is_dir()


def test_a_given_one_of_an_earlier_run_is_used_again(base: Path) -> None:
    wanted = base / "run"
    wanted.mkdir(mode=0o700)
    for name in ("owner", "supervisor", "engine.0.1.error"):
        (wanted / name).touch()
    with run_directory(str(wanted)) as path:
        assert path == wanted


def test_a_given_one_with_other_files_is_refused_and_left_as_it_is(base: Path) -> None:
    """Everything in it was removed at the end: a home folder, say."""
    wanted = base / "home"
    wanted.mkdir(mode=0o700)
    (wanted / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="holds other files"), run_directory(str(wanted)):
        pass
    assert [path.name for path in wanted.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o777])
def test_a_given_one_that_others_can_enter_is_refused(base: Path, mode: int) -> None:
    wanted = base / "run"
    wanted.mkdir()
    wanted.chmod(mode)
    with pytest.raises(ConfigError, match="must belong to you alone"), run_directory(str(wanted)):
        pass


def test_a_given_one_of_another_user_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = base / "run"
    wanted.mkdir(mode=0o700)
    real = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: real + 1)
    with pytest.raises(ConfigError, match="must belong to you alone"), run_directory(str(wanted)):
        pass


def test_a_given_one_that_is_too_long_is_named(base: Path) -> None:
    wanted = base / ("x" * 90)
    expected = pytest.raises(ConfigError, match=f"{wanted} is longer than .* too long for the sockets")
    with expected, run_directory(str(wanted)):
        pass
    assert not wanted.exists()


def test_a_given_one_that_cannot_be_made_is_named(base: Path) -> None:
    (base / "file").touch()
    expected = pytest.raises(ConfigError, match=r"cannot use .*file/run: Not a directory")
    with expected, run_directory(str(base / "file" / "run")):
        pass


def test_nowhere_to_go(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "MAX_IPC_PATH_BYTES", 20)
    with pytest.raises(ConfigError, match=r"set runtime\.run_dir"), run_directory(""):
        pass


def test_a_system_without_room_for_temporary_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container whose root is read-only the start ended with a traceback."""

    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    expected = pytest.raises(ConfigError, match=r"No usable temporary directory found: set TMPDIR or runtime\.run_dir")
    with expected, run_directory(""):
        pass


def test_a_given_one_on_a_read_only_disk_is_named(base: Path) -> None:
    wanted = base / "run"
    wanted.mkdir(mode=0o700)
    (wanted / "owner").mkdir()  # a write into it fails, for root too
    expected = pytest.raises(ConfigError, match=r"cannot write into .*/run: Is a directory")
    with expected, run_directory(str(wanted)):
        pass
