"""What has been said before: token counts for presence, frequency and repetition penalties.

Engine process. Counts live in one table with a row for each sequence that has a penalty; everybody else costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from engine.torch_core.request import Sequence


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
        table_rows = torch.tensor([self._row(sequence) for sequence in sequences], device=self._device)
        counts = self._output_counts[table_rows]
        seen = counts > 0
        selected = logits[rows]
        repetition = self._column([sequence.sampling.repetition_penalty for sequence in sequences])
        penalized = torch.where(selected > 0, selected / repetition, selected * repetition)
        selected = torch.where(seen | self._prompt_seen[table_rows], penalized, selected)
        selected -= self._column([sequence.sampling.frequency_penalty for sequence in sequences]) * counts
        selected -= self._column([sequence.sampling.presence_penalty for sequence in sequences]) * seen
        logits[rows] = selected

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
            prompt = torch.from_numpy(sequence.tokens[: sequence.num_prompt_tokens].astype("int64")).to(self._device)
            output = torch.from_numpy(sequence.output_ids.astype("int64")).to(self._device)
            self._output_counts[row] = torch.bincount(output, minlength=self._vocab_size)
            self._prompt_seen[row] = False
            self._prompt_seen[row, prompt] = True
        return self._row_of[sequence]

    def _grow(self) -> None:
        old = len(self._output_counts)
        more = max(4, old)
        self._output_counts = torch.cat([self._output_counts, self._output_counts.new_zeros(more, self._vocab_size)])
        self._prompt_seen = torch.cat([self._prompt_seen, self._prompt_seen.new_zeros(more, self._vocab_size)])
        self._free_rows += range(old, old + more)

    def _column(self, values: list[float]) -> Tensor:
        return torch.tensor(values, device=self._device)[:, None]
