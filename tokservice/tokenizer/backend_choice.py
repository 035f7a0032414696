"""Which back end encodes: the fast one only where it proved itself equal. Tokenizer worker, at start-up.

``auto`` tries ``fastokens`` against the reference on the texts of ``self_test``, once for each tokenizer.json and pair
of versions (the verdict is remembered), and says in one log line what it took and why.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from tokservice.runtime.memory import return_freed_memory
from tokservice.tokenizer import known, self_test
from tokservice.tokenizer.backends import Backend
from tokservice.tokenizer.known import Known
from tokservice.wire.errors import StartupError

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A loaded and warm back end."""

    backend: Backend
    known: Known
    reason: str


def choose(model_dir: Path, wanted: str) -> Choice:
    """Load the back end for a model. ``wanted``: as tokenizer.backend. Raises StartupError."""
    start_s = time.perf_counter()
    path = model_dir / "tokenizer.json"
    try:
        facts, record = known.recall(path.read_bytes())
    except OSError as error:
        raise StartupError(f"cannot read {path}, which the model's folder needs: {error.strerror}") from error
    except StartupError as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    match wanted:
        case "hf":
            choice = Choice(load_reference(path), facts, "as configured")
        case "fastokens":
            choice = Choice(_load_fastokens(path), facts, "as configured, untested")
        case _:
            choice = _proven(path, facts)
    if choice.known != facts:
        known.remember(choice.known, record)
    return_freed_memory()  # of examining, and of the reference
    seconds = time.perf_counter() - start_s
    log.info("tokenizer backend=%s reason=%r start_s=%.2f", choice.backend.name, choice.reason, seconds)
    return choice


def load_reference(path: Path) -> Backend:
    """The back end that the others must equal. Raises StartupError."""
    from tokservice.tokenizer.hf_backend import HuggingFaceBackend

    return _warm(HuggingFaceBackend(path))


def _load_fastokens(path: Path) -> Backend:
    """Raises StartupError where the library is absent or cannot do what the file asks for."""

    def load() -> Backend:
        from tokservice.tokenizer.fastokens_backend import FastokensBackend

        return _warm(FastokensBackend(path))

    return _guarded(load, f"fastokens cannot load {path.name}")


def _proven(path: Path, facts: Known) -> Choice:
    if facts.difference:
        return Choice(load_reference(path), facts, f"fastokens has {facts.difference} (remembered)")
    try:
        candidate = _load_fastokens(path)
    except StartupError as error:
        return Choice(load_reference(path), facts, str(error))  # not remembered: what is absent may be installed
    if facts.difference == "":
        return Choice(candidate, facts, "equal to the reference (remembered)")
    reference = load_reference(path)
    try:
        difference = _guarded(lambda: self_test.first_difference(candidate, reference), "fastokens failed")
    except StartupError as error:
        difference = f"a failure in the self-test: {error}"
    facts = msgspec.structs.replace(facts, difference=difference)
    if difference:
        return Choice(reference, facts, f"fastokens has {difference}")
    return Choice(candidate, facts, "equal to the reference")


def _warm(backend: Backend) -> Backend:
    """The first long text is slow: it fills caches and touches the tables."""
    backend.encode(self_test.long_text(), add_special_tokens=True)
    return backend


def _guarded(call: Callable[[], T], what: str) -> T:
    """Whatever a library raises, as a StartupError; a panic in Rust code is no Exception in Python."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise StartupError(f"{what}: {type(error).__name__}: {str(error)[:200]}") from error
