"""Compares a sample of what the fast back end encoded with the reference, after the answer is on its way. Tokenizer
worker, one thread.

Off by default: it costs the reference's memory, and its time for each sample. What differs is logged by digest and
length, never by content.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

from tokservice.tokenizer.backends import Backend, TokenIds

log = logging.getLogger(__name__)


class ShadowCheck:
    """Holds at most one sample: the last text that chance chose since the last ``run``."""

    def __init__(self, reference: Callable[[], Backend], rate: float, randbits: Callable[[int], int]) -> None:
        """``reference``: called for the first sample and all others. ``rate``: share of the texts, 0 to 1."""
        self._reference = reference
        self._threshold = round(rate * 2**32)
        self._randbits = randbits
        self._sample: tuple[str, bool, bool, TokenIds] | None = None

    def note(self, text: str, add_special_tokens: bool, special_as_text: bool, ids: TokenIds) -> None:
        """A text was encoded."""
        if self._randbits(32) < self._threshold:
            self._sample = text, add_special_tokens, special_as_text, ids

    def run(self) -> bool | None:
        """Whether the sample's ids are those of the reference; None without a sample."""
        if self._sample is None:
            return None
        text, add_special_tokens, special_as_text, ids = self._sample
        self._sample = None
        expected = self._reference().encode(
            text, add_special_tokens=add_special_tokens, special_as_text=special_as_text
        )
        if ids == expected:
            return True
        digest = hashlib.sha256(text.encode()).hexdigest()
        log.error("token ids differ from the reference sha256=%s num_chars=%d", digest, len(text))
        return False
