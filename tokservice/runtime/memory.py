"""The memory of this process as the system sees it. Any process; imports nothing of ours."""

from __future__ import annotations

import ctypes
import resource


def resident_bytes() -> int:
    """Resident memory; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def return_freed_memory() -> None:
    """What was freed goes back to the system: the C library would keep it for the life of the process."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # another C library
        return
