"""The kernels as machine code for this CPU, compiled at the first start and kept in the user's cache.

Engine process. Compiling takes some seconds, loading what was compiled some milliseconds and no numba.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import logging
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from llvmlite import binding

from tokservice.runtime.cache_dir import cache_dir
from tokservice.wire.errors import StartupError

DIGEST_SIZE = 32
KEPT_UNUSED_S = 30 * 24 * 3600
ARCH_PRCTL, REQUEST_REGISTERS, TILE_DATA = 158, 0x1023, 18  # arch_prctl(2) of x86-64, since Linux 5.16
REFUSALS = {  # where the text of the error number would mislead
    errno.EINVAL: "it is older than 5.16",
    errno.ENOSPC: "the alternate signal stack of a thread has no room for them",
}

log = logging.getLogger(__name__)


class MachineCode:
    """Loaded functions; they are there as long as this object is."""

    def __init__(self, code: bytes, machine: binding.TargetMachine, has_tiles: bool) -> None:
        self.has_tiles = has_tiles  # kernels that use the CPU's matrix unit are there
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
        self._engine.add_object_file(binding.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Of a kernel's ``void name(int64 *frame)``. Raises KeyError where there is none."""
        address: int = self._engine.get_function_address(name)
        if not address:
            raise KeyError(name)
        return address


def load_kernels(tell: Callable[[str], None] = log.info) -> MachineCode:
    """From the cache, or compiled now. Raises StartupError where the CPU cannot run them."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    cpu, host_features = binding.get_host_cpu_name(), binding.get_host_cpu_features()
    if host_features.get("f16c") is False:  # the code that would be made calls a library that is not there
        raise StartupError("the torch engine needs a CPU with F16C, which x86-64 ones have had since 2012")
    features = host_features.flatten()
    if host_features.get("avx512bf16"):  # LLVM takes half of the registers, since CPUs before these slow down
        features += ",-prefer-256-bit"
    machine = binding.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=3, jit=True)
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    has_tiles = bool(host_features.get("amx-bf16")) and _may_use_tiles()
    names = (machine.triple, cpu, features, str(has_tiles), version("numba"), version("llvmlite"))
    digests = [hashlib.sha256(part).digest() for part in (*sources, *(name.encode() for name in names))]
    name = hashlib.sha256(b"".join(digests)).hexdigest()
    file = cache_dir() / "kernels" / f"{name[:32]}.o"
    code = _read(file)
    if code is None:
        tell(f"compiling kernels for this CPU ({cpu}), once: some 25 seconds")
        code = _compile(machine, cpu, features, has_tiles)
        _write(file, code)
    return MachineCode(code, machine, has_tiles)


def _may_use_tiles() -> bool:
    """Ask Linux for the registers of the matrix unit, for all threads: 8 KiB more to save when a thread is switched."""
    if ctypes.CDLL(None, use_errno=True).syscall(ARCH_PRCTL, REQUEST_REGISTERS, TILE_DATA) == 0:
        return True
    number = ctypes.get_errno()
    reason = REFUSALS.get(number, os.strerror(number))
    log.warning("the CPU's matrix unit is not used, Linux does not lend its registers: %s", reason)
    return False


def _compile(machine: binding.TargetMachine, cpu: str, features: str, with_tiles: bool) -> bytes:
    """Without the user's settings of numba, which make other code or none, and are not in the file's name."""
    for setting in [name for name in os.environ if name.startswith("NUMBA_")]:
        del os.environ[setting]
    from numba import config  # it reads them when it is imported

    config.CPU_NAME, config.CPU_FEATURES = cpu, features
    from engine.torch_core.kernels.compiler import compile_kernels

    return compile_kernels(machine, with_tiles)


def _read(file: Path) -> bytes | None:
    """What ``_write`` wrote, marked as used; None where it is missing or not whole."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    with contextlib.suppress(OSError):
        os.utime(file)
    digest, code = content[:DIGEST_SIZE], content[DIGEST_SIZE:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(file: Path, code: bytes) -> None:
    """In one step, since others may be reading or writing it."""
    new = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(hashlib.sha256(code).digest() + code)
        new.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        log.warning("kernels are not kept, the next start compiles them again: %s", error)
    _remove_unused(file.parent)


def _remove_unused(folder: Path) -> None:
    """What other versions and interrupted starts left; files are read at a start alone, so nobody misses one."""
    since_s = time.time() - KEPT_UNUSED_S
    for file in folder.glob("*"):
        with contextlib.suppress(OSError):  # another start removes it too
            if file.stat().st_mtime < since_s:
                file.unlink()
