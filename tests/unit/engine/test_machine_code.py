"""The kernels' object file in the user's cache: compiled once, found again, replaced where it is damaged.

One small kernel stands for all of them: the file's name follows from sources, CPU and versions alone.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llvmlite import binding

from engine.torch_core.kernels import compiler, machine_code, rows
from engine.torch_core.kernels.machine_code import REQUEST_REGISTERS, TILE_DATA, load_kernels
from tests.helpers.loaded_kernels import require_tiles
from tokservice.wire.errors import StartupError

NAME = "rotate"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was compiled during the test."""
    results: list[bytes] = []
    compile_kernels = compiler.compile_kernels

    def compile_and_note(machine: Any, with_tiles: bool) -> bytes:
        results.append(compile_kernels(machine, with_tiles))
        return results[-1]

    monkeypatch.setattr(compiler, "KERNELS", {NAME: rows.rotate})
    monkeypatch.setattr(compiler, "TILE_KERNELS", {})
    monkeypatch.setattr(compiler, "compile_kernels", compile_and_note)
    return results


def the_file(cache: Path) -> Path:
    (file,) = [path for path in cache.rglob("*") if path.is_file()]
    return file


def python(code: str) -> subprocess.Popen[str]:
    """A fresh interpreter, which finds modules where this one does."""
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"]
    return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_later_process_loads_what_was_compiled(cache: Path, compiled: list[bytes]) -> None:
    """Importing numba and compiling would take seconds of every start."""
    assert load_kernels().address(NAME)
    file = the_file(cache)
    content, inode = file.read_bytes(), file.stat().st_ino
    code = (
        "from engine.torch_core.kernels.machine_code import load_kernels\n"
        f"assert load_kernels().address({NAME!r})\n"
        "print(*(name for name in sys.modules if name == 'numba' or name.endswith('kernels.compiler')))\n"
    )
    with python(code) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output == "\n"
    assert load_kernels().address(NAME)
    assert len(compiled) == 1
    assert the_file(cache) == file
    assert (file.read_bytes(), file.stat().st_ino) == (content, inode)


def test_a_kernel_that_is_not_there_has_no_address(cache: Path, compiled: list[bytes]) -> None:
    """Nor is a function of the C library one."""
    code = load_kernels()
    for name in ("add_norm_float32", "no_such_kernel", "malloc"):
        with pytest.raises(KeyError):
            code.address(name)
    assert code.address(NAME)


def cut(length: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:length]


def flip(place: int) -> Callable[[bytes], bytes]:
    def flipped(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[place] ^= 1
        return bytes(changed)

    return flipped


DAMAGES = {
    "empty": cut(0),
    "half a digest": cut(16),
    "digest alone": cut(32),
    "half of the code": cut(1000),
    "all but the last byte": cut(-1),
    "a byte more": lambda content: content + b"\0",
    "a bit in the digest": flip(0),
    "a bit at the start of the code": flip(32),
    "a bit in the middle": flip(1000),
    "a bit at the end": flip(-1),
    "of something else": lambda content: b"\x7fELF" + bytes(len(content)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_compiled_anew_and_replaced(
    damage: Callable[[bytes], bytes], cache: Path, compiled: list[bytes]
) -> None:
    """Loading it would end the process, or compute nonsense."""
    load_kernels()
    file = the_file(cache)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert load_kernels().address(NAME)
    assert len(compiled) == 2
    assert the_file(cache).read_bytes() == whole
    assert load_kernels().address(NAME)
    assert len(compiled) == 2


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """A home of nobody, say, or a full disk: kernels all the same, and a line that explains the slow start."""
    file = tmp_path / "file"
    file.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file / "cache"))
    assert load_kernels().address(NAME)
    assert len(compiled) == 1
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "next start compiles them again" in warning.getMessage()
    assert file.read_text() == "not a folder"


def test_processes_that_start_at_once_all_compile(cache: Path, compiled: list[bytes]) -> None:
    """Several engines of one machine, at its first start."""
    code = (
        "from engine.torch_core.kernels import compiler, rows\n"
        "from engine.torch_core.kernels.machine_code import load_kernels\n"
        f"compiler.KERNELS, compiler.TILE_KERNELS = {{{NAME!r}: rows.{NAME}}}, {{}}\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        f"assert load_kernels().address({NAME!r})\n"
        "print('loaded', flush=True)\n"
    )
    with python(code) as first, python(code) as second:
        for process in (first, second):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in (first, second):
            output, _ = process.communicate("go\n", timeout=60)
            assert output == "loaded\n"
            assert process.returncode == 0
    assert the_file(cache)  # and nothing beside it
    assert load_kernels().address(NAME)
    assert compiled == []


COMPILES_ONE = f"""
from types import SimpleNamespace

from engine.torch_core.kernels.machine_code import load_kernels

COMPILER = "engine.torch_core.kernels.compiler"

def compile_one(machine, with_tiles):
    del sys.modules[COMPILER]
    from engine.torch_core.kernels import compiler, rows

    compiler.KERNELS, compiler.TILE_KERNELS = {{{NAME!r}: rows.{NAME}}}, {{}}
    return compiler.compile_kernels(machine, with_tiles)

sys.modules[COMPILER] = SimpleNamespace(compile_kernels=compile_one)
load_kernels()
"""


SETTINGS = {  # of these, some end the process, some fail, some make other code
    "NUMBA_DISABLE_JIT": "1",
    "NUMBA_OPT": "0",
    "NUMBA_DEBUGINFO": "1",
    "NUMBA_BOUNDSCHECK": "1",
    "NUMBA_LOOP_VECTORIZE": "0",
    "NUMBA_ENABLE_AVX": "0",
    "NUMBA_CPU_NAME": "generic",
    "NUMBA_CPU_FEATURES": "",
}


def test_settings_of_numba_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are meant for other programs."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # on which names in the code depend
    contents = []
    for cache, settings in ((tmp_path / "without", {}), (tmp_path / "with", SETTINGS)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        with python(COMPILES_ONE) as process:
            process.communicate(timeout=60)
        assert process.returncode == 0
        file = the_file(cache)
        contents.append((file.name, file.read_bytes()))
    assert contents[0] == contents[1]


DAY_S = 24 * 3600


def set_age(file: Path, days: int) -> None:
    then_s = time.time() - days * DAY_S
    os.utime(file, (then_s, then_s))


def test_what_has_not_been_used_for_30_days_is_removed_when_another_is_written(
    cache: Path, compiled: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each version makes a file of its own. A start uses one, whenever it was written."""
    load_kernels()
    used = the_file(cache)
    set_age(used, 31)
    load_kernels()
    recent, old, interrupted = (used.with_name(name) for name in ("recent.o", "old.o", "interrupted.123"))
    for file, days in ((recent, 29), (old, 31), (interrupted, 31)):
        file.touch()
        set_age(file, days)
    load_kernels()
    assert old.exists()
    monkeypatch.setattr(machine_code, "version", lambda package: "another")
    load_kernels()
    assert len(compiled) == 2
    assert {used, recent} < set(used.parent.iterdir())
    assert len(list(used.parent.iterdir())) == 3


def test_a_cache_that_may_only_be_read_is_used(
    cache: Path, compiled: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    load_kernels()
    monkeypatch.setattr(os, "utime", refuse)
    assert load_kernels().address(NAME)
    assert len(compiled) == 1


@pytest.mark.parametrize("cpu_has_them", [False, True], ids=["absent", "present"])
@pytest.mark.parametrize("system_lends_them", [False, True], ids=["kept", "lent"])
def test_kernels_of_tiles_are_there_where_the_cpu_has_them_and_the_system_lends_them(
    cpu_has_them: bool, system_lends_them: bool, cache: Path, compiled: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others end the process: illegal instruction. A system may lend them at one start and not at the next."""
    features = binding.get_host_cpu_features()
    features["amx-bf16"] = cpu_has_them
    asked: list[bool] = []
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: features)
    monkeypatch.setattr(machine_code, "_may_use_tiles", lambda: asked.append(True) or system_lends_them)
    any_cpus = {"add_norm_float32": rows.norm_kernel("float32")}
    monkeypatch.setattr(compiler, "TILE_KERNELS", any_cpus)
    code = load_kernels()
    assert code.has_tiles == (cpu_has_them and system_lends_them)
    assert bool(asked) == cpu_has_them
    assert code.address(NAME)
    if code.has_tiles:
        assert code.address("add_norm_float32")
    else:
        with pytest.raises(KeyError):
            code.address("add_norm_float32")
    system_lends_them = not system_lends_them
    assert load_kernels().has_tiles == (cpu_has_them and system_lends_them)
    assert len(compiled) == (2 if cpu_has_them else 1)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a system call of x86-64")
@pytest.mark.parametrize(
    ("request_number", "registers", "reason"),
    [(0x1FFF, TILE_DATA, "older than 5.16"), (REQUEST_REGISTERS, 5, os.strerror(errno.EOPNOTSUPP))],
    ids=["unknown call", "unknown registers"],
)
def test_a_refusal_of_the_matrix_unit_is_logged(
    request_number: int,
    registers: int,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Prompts would take twice as long, and nobody would know why."""
    monkeypatch.setattr(machine_code, "REQUEST_REGISTERS", request_number)
    monkeypatch.setattr(machine_code, "TILE_DATA", registers)
    assert not machine_code._may_use_tiles()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert reason in record.getMessage()


SMALL_SIGNAL_STACK = """
import ctypes

from engine.torch_core.kernels import machine_code

class Stack(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(8192)
stack = Stack(ctypes.addressof(memory), 0, 8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
machine_code.log.warning = lambda message, reason: print(reason)
assert not machine_code._may_use_tiles()
"""


def test_registers_that_do_not_fit_on_a_signal_stack_are_not_lent() -> None:
    """As a profiler or a crash handler may leave one; "no space left on device" would mislead."""
    require_tiles()
    with python(SMALL_SIGNAL_STACK) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "signal stack" in output


def test_a_cpu_without_half_precision_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM ended the process: Symbol not found: __extendhfsf2."""
    features = binding.get_host_cpu_features()
    features["f16c"] = False
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: features)
    with pytest.raises(StartupError, match="F16C"):
        load_kernels()
