"""How soon a process that wakes gets a core from one that computes: the time slices of Linux.

API process, router, detokenizers; stdlib alone. A thread of low priority that was just given a core may keep it for its
slice, some 3 ms, from one of higher priority; not from one whose own slice is shorter (kernels since 6.12). Beside an
engine on both of two cores a heartbeat of 1 ms was 3.4 ms late in one of a hundred cases, with a slice of 0.1 ms 0.14.
Source: sched_setattr(2).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

SHORT_US = 100  # the least there is
_ATTRIBUTES = struct.Struct("IIQiIQQQ")  # size, policy, flags, nice, priority, runtime in ns, deadline, period
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}


def shorten_time_slice() -> None:
    """Of this thread, and of those that it starts from now on. Nothing where the system has no such thing."""
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, SHORT_US * 1000, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, attributes, 0)  # a refusal changes nothing
