"""What has been said before: token counts for presence, frequency and repetition penalties.

Engine process. Counts live in one table with a row for each sequence that has a penalty; everybody else costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from engine.torch_core.request import Sequence
from engine.torch_core.transfer import upload


class PenaltyTable:
    """Rows are taken when a sequence is first seen, and kept up to date by ``count`` and ``forget``."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._row_of: dict[Sequence, int] = {}
        self._free_rows: list[int] = []
        self._output_counts = torch.zeros(0, vocab_size, device=device)  # (rows, vocab_size) float32
        self._prompt_seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    @staticmethod
    def applies_to(sequence: Sequence) -> bool:
        """Whether the sequence has a penalty at all."""
        sampling = sequence.sampling
        return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)

    def apply(self, logits: Tensor, rows: Many[int], sequences: Many[Sequence]) -> None:
        """Change ``logits[rows]``, (num_rows, vocab_size), in place, by the penalties of their sequences."""
        every = [sequence.sampling for sequence in sequences]
        table_rows = upload([self._row(sequence) for sequence in sequences], self._device)
        where = upload(rows, self._device)
        factors = [(one.repetition_penalty, one.frequency_penalty, one.presence_penalty) for one in every]
        columns = upload(np.array(factors, np.float32)[:, :, None], self._device)
        repetition, frequency, presence = columns.unbind(1)  # (num_rows, 1) each
        counts = self._output_counts.index_select(0, table_rows)
        seen = counts > 0
        selected = logits.index_select(0, where)
        penalized = torch.where(selected > 0, selected / repetition, selected * repetition)
        selected = torch.where(seen | self._prompt_seen.index_select(0, table_rows), penalized, selected)
        selected -= frequency * counts
        selected -= presence * seen
        logits.index_copy_(0, where, selected)

    def count(self, sequence: Sequence, token: int) -> None:
        """The sequence has a new output token."""
        row = self._row_of.get(sequence)
        if row is not None:
            self._output_counts[row, token] += 1

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended: its row is free."""
        row = self._row_of.pop(sequence, None)
        if row is not None:
            self._free_rows.append(row)

    def _row(self, sequence: Sequence) -> int:
        if sequence not in self._row_of:
            if not self._free_rows:
                self._grow()
            row = self._row_of[sequence] = self._free_rows.pop()
            prompt = upload(sequence.tokens[: sequence.num_prompt_tokens].astype(np.int64), self._device)
            output = upload(sequence.output_ids.astype(np.int64), self._device)
            counts = self._output_counts[row].zero_()
            counts.index_add_(0, output, torch.ones_like(output, dtype=counts.dtype))
            self._prompt_seen[row].fill_(False).index_fill_(0, prompt, True)
        return self._row_of[sequence]

    def _grow(self) -> None:
        old = len(self._output_counts)
        more = max(4, old)
        self._output_counts = torch.cat([self._output_counts, self._output_counts.new_zeros(more, self._vocab_size)])
        self._prompt_seen = torch.cat([self._prompt_seen, self._prompt_seen.new_zeros(more, self._vocab_size)])
        self._free_rows += range(old, old + more)
