"""Accounting of the paged KV cache: who holds which block, and which free block still has known content.

Engine process; pure: block numbers only, the tensors are in the attention files.

A block holds the keys and values of ``block_size`` consecutive tokens. A full block is known by a hash of its
tokens and of all tokens before them; a sequence that begins with the same tokens shares it. Freed blocks keep
their content, and are reused from the least recently freed on, so the free list is at once the cache of prefixes
(the scheme of vLLM's prefix caching).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.core import TokenIds


class BlockPool:
    """Blocks 0 .. num_blocks-1, each free or held by one sequence or more."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next victim first
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}  # block -> hash of its content, where it is full
        self._block_of: dict[bytes, int] = {}  # the inverse

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens need."""
        return -(-num_tokens // self.block_size)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The longest run of known blocks with these hashes, from the first on. Takes none of them."""
        found = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_among(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are free at present, so that sharing them would use up free blocks."""
        return sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Hold known blocks (from ``find``) once more."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hold ``count`` free blocks, forgetting what they contained. The caller has checked ``num_free``."""
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            digest = self._hash_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]
        return blocks

    def publish(self, block: int, digest: bytes) -> None:
        """State the content of a full block, for others to find; the first of equal blocks stays the known one."""
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks; its last ones become victims before its first ones."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
            elif self._references[block] < 0:
                raise RuntimeError(f"block {block} was released more often than it was held")


def extend_hashes(hashes: list[bytes], tokens: TokenIds, num_blocks: int, block_size: int, salt: bytes) -> None:
    """Append to ``hashes`` until it covers the first ``num_blocks`` full blocks of ``tokens``.

    Blocks are shared only among sequences of one salt.
    """
    for index in range(len(hashes), num_blocks):
        parent = hashes[index - 1] if index else salt
        content = tokens[index * block_size : (index + 1) * block_size]
        hashes.append(hashlib.blake2b(parent + content.tobytes(), digest_size=16).digest())
