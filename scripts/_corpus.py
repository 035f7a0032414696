"""Text for benchmarks: English and code in turn, drawn with a seed. Nothing is downloaded.

The pieces come from Python itself: the paragraphs of its language reference, which ``help()`` shows, and functions
of its library. So the text is real, and the same everywhere but for differences between versions of Python.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import random
import re
from pydoc_data import topics

_MODULES = (
    "argparse",
    "ast",
    "dataclasses",
    "difflib",
    "doctest",
    "inspect",
    "mailbox",
    "optparse",
    "pdb",
    "tarfile",
    "textwrap",
    "typing",
)


def text(num_chars: int, seed: int) -> str:
    """At least so many characters."""
    rng = random.Random(seed)
    parts: list[str] = []
    length = 0
    while length < num_chars:
        parts.append(rng.choice(_pieces()[len(parts) % 2]))
        length += len(parts[-1])
    return "".join(parts)


@functools.cache
def _pieces() -> tuple[list[str], list[str]]:
    """Prose and code; each piece ends with an empty line."""
    prose = [text for topic in sorted(topics.topics) for text in re.split(r"\n\s*\n", topics.topics[topic])]
    modules = map(importlib.import_module, _MODULES)
    code = [text for module in modules for text in re.split(r"\n\n+(?=\S|    def )", inspect.getsource(module))]
    return _ended(prose), _ended(code)


def _ended(pieces: list[str]) -> list[str]:
    return [piece + "\n\n" for piece in pieces if piece.strip()]
