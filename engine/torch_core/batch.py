"""One step's chunks as arrays: a row for each token to compute.

Engine process; numpy alone. Rows that attend by table lookup come first, sorted by the length of their context
into groups; then come the prefill chunks, each a run of rows. Built once per step, used by every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.torch_core.scheduler import Chunk

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LookupGroup:
    """Rows lo .. hi-1, each with a context of its own; none needs more than ``width`` blocks, most need over half."""

    lo: int
    hi: int
    width: int


@dataclass(frozen=True, slots=True)
class PrefillRun:
    """Rows lo .. hi-1: tokens start .. start+hi-lo-1 of one sequence."""

    lo: int
    hi: int
    start: int
    blocks: Ints  # of the sequence up to the end of the chunk


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything that the model needs to know about a step."""

    token_ids: Ints  # (num_rows,); -1 - i: the token that row i of the last step sampled, which only the device knows
    positions: Ints  # (num_rows,)
    write_blocks: Ints  # (num_rows,) block that receives the row's key and value
    write_offsets: Ints  # (num_rows,) place within the block
    blocks: Ints  # block tables of all chunks, one after the other
    context_lens: Ints  # (num_lookup_rows,) tokens that each row attends to, itself included
    block_starts: Ints  # (num_lookup_rows,) where each row's blocks begin in ``blocks``
    groups: list[LookupGroup]
    prefills: list[PrefillRun]
    row_of: list[Ints]  # per chunk: the rows of its tokens


def build_batch(chunks: Sequence[Chunk], block_size: int, max_lookup_tokens: int) -> StepBatch:
    """Arrange chunks of up to ``max_lookup_tokens`` tokens for lookup, longer ones as prefill runs."""
    num_chunks = len(chunks)
    starts = np.fromiter((chunk.start for chunk in chunks), np.int64, num_chunks)
    counts = np.fromiter((chunk.num_tokens for chunk in chunks), np.int64, num_chunks)
    table_lens = (starts + counts - 1) // block_size + 1
    table_starts = np.cumsum(table_lens) - table_lens
    tables = [chunk.sequence.block_table[:length] for chunk, length in zip(chunks, table_lens.tolist(), strict=True)]
    blocks = np.fromiter((block for table in tables for block in table), np.int64, int(table_lens.sum()))

    chunk_of = np.repeat(np.arange(num_chunks), counts)
    first_rows = np.cumsum(counts) - counts
    positions = starts[chunk_of] + np.arange(len(chunk_of)) - first_rows[chunk_of]
    token_ids = np.concatenate([chunk.sequence.tokens[chunk.start : chunk.end] for chunk in chunks]).astype(np.int64)
    # An unknown token is its sequence's last, and so the last one of a chunk that reaches so far.
    pending = (chunk.sequence.pending_row if chunk.samples else -1 for chunk in chunks)
    pending_rows = np.fromiter(pending, np.int64, num_chunks)
    last_rows = first_rows + counts - 1
    token_ids[last_rows] = np.where(pending_rows >= 0, -1 - pending_rows, token_ids[last_rows])
    num_blocks = positions // block_size + 1
    widths = 1 << np.ceil(np.log2(num_blocks)).astype(np.int64)  # the next power of two
    looks_up = counts[chunk_of] <= max_lookup_tokens
    num_lookup_rows = int(looks_up.sum())

    order = np.argsort(np.where(looks_up, widths, np.iinfo(np.int64).max), kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    chunk_of, positions, widths = chunk_of[order], positions[order], widths[order]
    write_tables = table_starts[chunk_of] + positions // block_size

    groups = []
    edges = np.flatnonzero(np.diff(widths[:num_lookup_rows])) + 1
    for lo, hi in zip([0, *edges.tolist()], [*edges.tolist(), num_lookup_rows], strict=True):
        if hi > lo:
            groups.append(LookupGroup(lo, hi, int(widths[lo])))
    prefills = []
    row_of = []
    for index, count in enumerate(counts.tolist()):
        rows_of_chunk = place[first_rows[index] : first_rows[index] + count]
        row_of.append(rows_of_chunk)
        if count > max_lookup_tokens:
            lo = int(rows_of_chunk[0])
            table = blocks[table_starts[index] : table_starts[index] + table_lens[index]]
            prefills.append(PrefillRun(lo, lo + count, int(starts[index]), table))
    return StepBatch(
        token_ids=token_ids[order],
        positions=positions,
        write_blocks=blocks[write_tables],
        write_offsets=positions % block_size,
        blocks=blocks,
        context_lens=positions[:num_lookup_rows] + 1,
        block_starts=table_starts[chunk_of[:num_lookup_rows]],
        groups=groups,
        prefills=prefills,
        row_of=row_of,
    )
