"""Keeps the caches of a back end from growing without bound. Tokenizer worker, one thread.

fastokens bounds the number of pieces that it remembers, not their length: thousands of distinct long words would fill
the memory (of the reference: huggingface/tokenizers#1539). So the growth of the process is watched between requests,
and the back end starts afresh when it has grown too much, which takes as long as loading it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tokservice.runtime.memory import return_freed_memory
from tokservice.tokenizer.backends import Backend

MAX_GROWTH_BYTES = 512 << 20

log = logging.getLogger(__name__)


class CacheBound:
    """Watches one back end."""

    def __init__(self, backend: Backend, resident_bytes: Callable[[], int]) -> None:
        """``resident_bytes``: of this process."""
        self._backend = backend
        self._resident_bytes = resident_bytes
        self._limit = 0  # 0: not known before the first check

    def check(self) -> None:
        """Between two requests, once in a while."""
        before = self._resident_bytes()
        if not self._limit:
            self._limit = before + MAX_GROWTH_BYTES
        if before <= self._limit:
            return
        self._backend.forget()
        return_freed_memory()
        after = self._resident_bytes()
        self._limit = max(self._limit, after + MAX_GROWTH_BYTES // 4)  # what did not go was not in the caches
        log.info("tokenizer caches dropped resident_mb=%d now_mb=%d", before >> 20, after >> 20)
