"""Where files are kept that only save time, and that any start can make again. Any process; imports nothing of ours."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Below $XDG_CACHE_HOME, or ~/.cache where that is not set to an absolute path."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(configured) if os.path.isabs(configured) else _home() / ".cache") / "tokservice"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # no HOME, and a uid that no user has: as login(1) does
        return Path("/")
