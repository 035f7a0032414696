"""What a dead worker was working on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tokservice.runtime.work_mark import WorkMark, encode_mark, take_mark

WRITER = """
import signal, sys
from pathlib import Path
from tokservice.runtime.work_mark import WorkMark, encode_mark
WorkMark(Path(sys.argv[1]), "tokenizer.0.1").set(encode_mark("api.0.1:7", 2))
print("set", flush=True)
signal.pause()
"""


def test_the_mark_outlives_a_kill(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"set\n"
        os.kill(writer.pid, signal.SIGKILL)
    assert take_mark(tmp_path, "tokenizer.0.1") == ("api.0.1:7", 2)
    assert not list(tmp_path.iterdir()), "marks of the dead pile up"
    assert take_mark(tmp_path, "tokenizer.0.1") is None


def test_an_idle_worker_leaves_none(tmp_path: Path) -> None:
    mark = WorkMark(tmp_path, "tokenizer.0.1")
    mark.set(encode_mark("a longer request id than the one after it", 11))
    mark.set(encode_mark("b", 1))
    assert take_mark(tmp_path, "tokenizer.0.1") == ("b", 1)
    mark = WorkMark(tmp_path, "tokenizer.0.1")
    mark.set(encode_mark("b", 1))
    mark.clear()
    assert take_mark(tmp_path, "tokenizer.0.1") is None


def test_the_file_is_private(tmp_path: Path) -> None:
    WorkMark(tmp_path, "tokenizer.0.1")
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o077 == 0


def test_a_full_disk_ends_no_worker(tmp_path: Path) -> None:
    """The first mark was a write to a mapped hole in the file: no room for it is SIGBUS, and the next worker's too."""
    kept = WorkMark(tmp_path, "tokenizer.0.1")
    (path,) = tmp_path.iterdir()
    assert path.stat().st_blocks > 0, "a hole, which the disk may have no room for later"
    kept.set(encode_mark("b", 1))
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    command = [sys.executable, "-c", full + WRITER.replace("signal.pause()", ""), str(tmp_path)]
    subprocess.run(command, capture_output=True, check=True)
