"""Packages of this project's extras, for scripts: where one is absent, the script ends with the line that installs it.

from _extras import psutil
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

EXTRAS = {"matplotlib": "bench", "psutil": "test", "transformers": "test"}


def how_to_install(package: str) -> str:
    """One line."""
    return f"{package} is not installed: {sys.executable} -m pip install --editable '.[{EXTRAS[package]}]'"


def __getattr__(package: str) -> Any:
    """Import a package, or end the program."""
    if package not in EXTRAS:
        raise AttributeError(package)
    try:
        return importlib.import_module(package)
    except ImportError:
        sys.exit(how_to_install(package))
