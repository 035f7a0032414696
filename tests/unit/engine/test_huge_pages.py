"""Pages of 2 MiB for the weights: which mappings are chosen, and that what they hold stays."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from engine.torch_core.huge_pages import SIZE, filled, use_huge_pages

MIB = 2**20


def mapping(
    start: int, end: int, rss: int, *, perms: str = "rw-p", inode: int = 0, path: str = "", huge: int = 0
) -> str:
    head = f"{start:x}-{end:x} {perms} 00000000 00:00 {inode} {path}".rstrip() + (" " if not path else "")
    sizes = {"Size": end - start, "Rss": rss, "AnonHugePages": huge}
    return "\n".join([head, *(f"{name}: {size // 1024:8} kB" for name, size in sizes.items()), "VmFlags: rd wr", ""])


def test_full_private_memory_is_chosen() -> None:
    """An unused stack of a thread, say, would be filled with zeros; a file's pages are not ours to move."""
    smaps = "".join(
        [
            mapping(16 * MIB, 24 * MIB, 8 * MIB),
            mapping(25 * MIB, 31 * MIB, 6 * MIB, path="[heap]"),
            mapping(40 * MIB, 48 * MIB, 5 * MIB),  # used in part
            mapping(50 * MIB, 58 * MIB, 8 * MIB, inode=7, path="/models/weights of mine"),
            mapping(60 * MIB, 68 * MIB, 8 * MIB, perms="r--p"),
            mapping(70 * MIB, 71 * MIB, 1 * MIB),  # smaller than a page
            mapping(80 * MIB, 88 * MIB, 8 * MIB, huge=8 * MIB),
            mapping(90 * MIB, 98 * MIB, 8 * MIB, huge=2 * MIB),
        ]
    )
    assert list(filled(smaps)) == [(16 * MIB, 24 * MIB), (26 * MIB, 30 * MIB), (90 * MIB, 98 * MIB)]


def test_what_a_page_holds_stays() -> None:
    memory = mmap.mmap(-1, 8 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    values = np.frombuffer(memory, np.uint64)
    values[:] = np.arange(len(values))
    memory.madvise(mmap.MADV_HUGEPAGE)
    moved = use_huge_pages()
    assert np.array_equal(values, np.arange(len(values)))
    if moved == 0:
        pytest.skip("this kernel has no pages of 2 MiB")
    (in_pages,) = re.findall(r"^AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert int(in_pages) * 1024 >= 7 * SIZE  # the mapping need not begin at such a page


def test_a_system_without_such_pages_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.torch_core.huge_pages._SMAPS", tmp_path / "absent")
    assert use_huge_pages() == 0
