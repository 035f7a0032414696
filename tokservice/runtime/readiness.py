"""Whether all processes are ready, and if not, why. Launcher; pure."""

from __future__ import annotations

from collections.abc import Sequence

from tokservice.runtime.children import Child
from tokservice.runtime.config import RuntimeConfig
from tokservice.wire.messages import Role


def why_not_ready(children: Sequence[Child], topology_version: int, settings: RuntimeConfig, now_s: float) -> str:
    """The reason, for people; '' if every process is ready and beating. ``now_s`` is monotonic.

    The dead come first: the others have to learn of them.
    """
    for child in children:
        if child.hello is None:
            name = f"{child.role.label} {child.slot}"
            if child.restarts.is_crash_loop:
                return f"{name} keeps ending: {child.last_end}"
            return f"{name} is starting" + (f": {child.doing}" if child.doing else "")
    for child in children:
        long_work = child.role in (Role.ENGINE, Role.TOKENIZER)
        limit_s = settings.busy_stall_timeout_s if long_work else settings.stall_timeout_s
        if now_s - child.last_beat_s > limit_s:
            return f"{child.role.label} {child.slot} has stalled"
    for child in children:
        if child.topology_version < topology_version:
            return f"{child.role.label} {child.slot} is getting to know the others"
    return ""
