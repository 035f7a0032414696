"""Blocks: free, held, shared, found again."""

from __future__ import annotations

import numpy as np
import pytest

from engine.torch_core.kv_cache import BlockPool, extend_hashes


def test_accounting() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(3)
    assert (pool.num_free, pool.num_used) == (1, 3)
    pool.share(blocks[:2])
    pool.release(blocks)
    assert (pool.num_free, pool.num_used) == (2, 2)
    pool.release(blocks[:2])
    assert (pool.num_free, pool.num_used) == (4, 0)
    with pytest.raises(RuntimeError, match="more often"):
        pool.release(blocks[:1])


def test_freed_content_is_found_until_its_block_is_needed() -> None:
    pool = BlockPool(3, 16)
    blocks = pool.allocate(2)
    hashes = [b"first", b"second"]
    for block, digest in zip(blocks, hashes, strict=True):
        pool.publish(block, digest)
    pool.release(blocks)
    assert pool.find(hashes) == blocks
    assert pool.num_free_among(blocks) == 2
    pool.allocate(2)  # the one that was never used, then the last of the released ones
    assert pool.find(hashes) == blocks[:1]
    pool.allocate(1)
    assert pool.find(hashes) == []


def test_equal_content_is_published_once() -> None:
    pool = BlockPool(2, 16)
    first, second = pool.allocate(2)
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    assert pool.find([b"same"]) == [first]


def test_hashes_depend_on_everything_before_and_on_the_salt() -> None:
    tokens = np.arange(12, dtype=np.uint32)
    changed = tokens.copy()
    changed[0] = 99
    hashes: list[list[bytes]] = [[], [], [], []]
    extend_hashes(hashes[0], tokens, 3, 4, b"")
    extend_hashes(hashes[1], tokens, 2, 4, b"")
    extend_hashes(hashes[1], tokens, 3, 4, b"")
    extend_hashes(hashes[2], changed, 3, 4, b"")
    extend_hashes(hashes[3], tokens, 3, 4, b"r/1")
    assert hashes[0] == hashes[1]
    assert not set(hashes[0]) & set(hashes[2])
    assert not set(hashes[0]) & set(hashes[3])
