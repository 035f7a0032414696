"""From logits to tokens, for all sequences of a step together.

Engine process. The order is: guide, bad words, minimum length and logit_bias, then penalties, temperature, top_k,
top_p, min_p, then one draw. A token is drawn by inverting the distribution's cumulative sum, in the order of token
ids, at one uniform number for each (seed, choice, position): see ``noise.py``. Thresholds are values, so tokens that
tie with the last one of top_k or top_p stay in. Every operation works row by row: a row's token does not depend on
the others.

Nothing here waits for the device: numbers go there by ``upload`` and come back by ``Download``, rows are chosen by
index and never by a mask (whose number of rows the host would have to know), and Python sees no value of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.core import Logprobs, TokenIds
from engine.torch_core.guide import Guide, GuideFailed
from engine.torch_core.noise import noise_keys, uniforms
from engine.torch_core.penalties import PenaltyTable
from engine.torch_core.request import Sequence
from engine.torch_core.transfer import Download, upload

CANDIDATES = 256  # top_p looks at so many most likely tokens first; a multiple of any vector register's width
MIN_TEMPERATURE = 1e-5  # below, greedy: a division would overflow


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a step chose, on the host; row i belongs to sequence i."""

    token_ids: npt.NDArray[np.int64]
    valid: npt.NDArray[np.bool_]  # False: the logits had no usable maximum, so the choice cannot go on
    logprobs: dict[int, Logprobs]  # by row, where asked for


class Sampled:
    """What a step chose, on the device and on its way to the host."""

    def __init__(self, token_ids: Tensor, valid: Tensor, scores: _Scores | None) -> None:
        self.token_ids = token_ids  # (num_rows,) int64
        self._scores = scores
        self._download = Download(token_ids, valid, *((scores.token_ids, scores.logprobs) if scores else ()))

    def read(self) -> Tokens:
        """Wait for the step's end."""
        token_ids, valid, *scores = self._download.read()
        logprobs = {}
        if self._scores is not None:
            ids, values = scores[0].astype(np.uint32), scores[1]
            for i, (row, count) in enumerate(zip(self._scores.rows, self._scores.counts, strict=True)):
                logprobs[row] = Logprobs(ids[i : i + 1, : 1 + count], values[i : i + 1, : 1 + count])
        return Tokens(token_ids, valid, logprobs)


@dataclass(frozen=True, slots=True)
class _Scores:
    """Log-probabilities of the rows that want them, the most likely tokens of each up to the largest count."""

    rows: list[int]
    counts: list[int]
    token_ids: Tensor  # (len(rows), 1 + max(counts)), the chosen one first
    logprobs: Tensor  # the same shape


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The numbers of one set of sequences as tensors; random rows only."""

    rows: list[int]
    where: Tensor  # the same, on the device
    keys: npt.NDArray[np.uint64]
    temperature: Tensor  # (rows, 1)
    top_k: Tensor  # (rows, 1) int64; the vocabulary's size: off
    top_p: Tensor
    log_min_p: Tensor  # -inf: off
    filters: bool
    num_candidates: int  # tokens to sort


class Sampler:
    """Keeps token counts and guides of the sequences that it has seen, until ``forget``."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._penalties = PenaltyTable(vocab_size, device)
        self._guides: dict[Sequence, Guide] = {}
        self._sequences: list[Sequence] = []  # those that ``_parameters`` describes
        self._parameters: _Parameters | None = None

    def set_guide(self, sequence: Sequence, guide: Guide) -> None:
        """The sequence's tokens are restricted by a guide, which stands at its present output."""
        self._guides[sequence] = guide

    def accept(self, sequence: Sequence, token: int) -> None:
        """The sequence has a new output token. Raises GuideFailed."""
        self._penalties.count(sequence, token)
        if sequence in self._guides:
            self._guides[sequence].accept(token)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._penalties.forget(sequence)
        self._guides.pop(sequence, None)

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> Sampled:
        """Choose a token for each row of logits, (num_rows, vocab_size) float32, which are used up."""
        scored = [row for row, sequence in enumerate(sequences) if sequence.sampling.num_logprobs >= 0]
        where = upload(scored, self._device) if scored else None
        raw = None if where is None else logits.index_select(0, where).log_softmax(dim=-1)
        self._restrict(logits, sequences)
        maxima, token_ids = logits.max(dim=-1)
        parameters = self._parameters_of(sequences)
        if parameters is not None:
            drawn = self._draw(logits.index_select(0, parameters.where), parameters, sequences)
            token_ids.index_copy_(0, parameters.where, drawn)
        scores = None
        if where is not None and raw is not None:
            counts = [min(sequences[row].sampling.num_logprobs, self._vocab_size) for row in scored]
            scores = _Scores(scored, counts, *_scores(raw, token_ids.index_select(0, where), max(counts)))
        return Sampled(token_ids, torch.isfinite(maxima), scores)

    def _restrict(self, logits: Tensor, sequences: list[Sequence]) -> None:
        """Masks, biases and penalties, in place; a loop over those sequences alone that have any."""
        forbidden: list[int] = []  # places in the flat logits
        biased: list[int] = []
        biases: list[float] = []
        penalized = []
        for row, sequence in enumerate(sequences):
            sampling, start = sequence.sampling, row * self._vocab_size
            if sequence in self._guides:
                self._apply_guide(logits[row], self._guides[sequence])
            if sampling.bad_words_ids:
                output = sequence.output_ids
                forbidden += [start + word[-1] for word in sampling.bad_words_ids if _ends_with(output, word[:-1])]
            if sequence.num_output_tokens < sampling.min_tokens and not self._is_complete(sequence):
                forbidden += [start + token for token in sequence.stop_ids]
            if sampling.logit_bias_ids:
                biased += [start + token for token in sampling.logit_bias_ids]
                biases += sampling.logit_bias_values
            if self._penalties.applies_to(sequence):
                penalized.append(row)
        flat = logits.view(-1)
        if forbidden:
            flat.index_fill_(0, upload(forbidden, self._device), -torch.inf)
        if biased:
            flat.index_add_(0, upload(biased, self._device), upload(np.array(biases, np.float32), self._device))
        if penalized:
            self._penalties.apply(logits, penalized, [sequences[row] for row in penalized])

    def _is_complete(self, sequence: Sequence) -> bool:
        """Whether its guide allows the end alone, so that min_tokens cannot be had."""
        return sequence in self._guides and self._guides[sequence].is_complete

    def _apply_guide(self, logits: Tensor, guide: Guide) -> None:
        try:
            allowed = upload(guide.allowed(), self._device)
        except GuideFailed:
            logits.fill_(-torch.inf)  # no valid token: the engine ends this choice alone
            return
        logits.masked_fill_(~allowed, -torch.inf)

    def _parameters_of(self, sequences: list[Sequence]) -> _Parameters | None:
        if sequences != self._sequences:  # in decode, the same sequences come step after step
            self._sequences = list(sequences)
            self._parameters = self._tensors(sequences)
        return self._parameters

    def _tensors(self, sequences: list[Sequence]) -> _Parameters | None:
        rows = [row for row, seq in enumerate(sequences) if seq.sampling.temperature >= MIN_TEMPERATURE]
        if not rows:
            return None
        chosen = [sequences[row] for row in rows]
        every = [sequence.sampling for sequence in chosen]
        top_k = [min(one.top_k or self._vocab_size, self._vocab_size) for one in every]
        log_min_p = [float(np.log(one.min_p)) if one.min_p else -np.inf for one in every]

        def column(values: Many[float]) -> Tensor:
            return upload(np.array(values, np.float32), self._device)[:, None]

        max_top_k = max([k for k in top_k if k < self._vocab_size], default=1)
        num_candidates = min(-(-max_top_k // CANDIDATES) * CANDIDATES, self._vocab_size)
        if self._device.type != "cpu" and any(one.top_p < 1 and not one.top_k for one in every):
            num_candidates = self._vocab_size  # whether fewer hold enough is not worth waiting for
        return _Parameters(
            rows=rows,
            where=upload(rows, self._device),
            keys=noise_keys([one.seed for one in every], [sequence.choice for sequence in chosen]),
            temperature=column([one.temperature for one in every]),
            top_k=upload(top_k, self._device)[:, None],
            top_p=column([one.top_p for one in every]),
            log_min_p=column(log_min_p),
            filters=any(one.top_k or one.top_p < 1 or one.min_p for one in every),
            num_candidates=num_candidates,
        )

    def _draw(self, logits: Tensor, parameters: _Parameters, sequences: list[Sequence]) -> Tensor:
        logits = logits.div_(parameters.temperature)
        if parameters.filters:
            keep_likely(logits, parameters.top_k, parameters.top_p, parameters.log_min_p, parameters.num_candidates)
        positions = np.array([sequences[row].num_output_tokens for row in parameters.rows], np.int64)
        noise = upload(uniforms(parameters.keys, positions), self._device)
        cumulative = logits.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        targets = noise[:, None] * cumulative[:, -1:]
        return torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp_(max=self._vocab_size - 1)


def _ends_with(output: TokenIds, tokens: tuple[int, ...]) -> bool:
    """The last token alone tells most apart: a request may name hundreds of words, each of a hundred tokens."""
    if not tokens:
        return True
    return len(output) >= len(tokens) and output[-1] == tokens[-1] and output[-len(tokens) :].tolist() == list(tokens)


def keep_likely(logits: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor, count: int) -> None:
    """Set the logits (rows, vocab) of tokens outside top_k, top_p and min_p to -inf, in place.

    The parameters are columns (rows, 1). Only the ``count`` most likely tokens are sorted, at least top_k of each row
    that has one. Where they hold too little of some row's mass, all of that row's are: on a CPU alone, since it takes
    a look at the result; elsewhere a ``count`` of the whole vocabulary is needed for top_p without top_k.
    """
    vocab_size = logits.shape[1]
    count = min(count, vocab_size)
    log_probs = logits.log_softmax(dim=-1)
    best = _largest(log_probs, count)
    kth = best.gather(1, (top_k - 1).clamp(max=count - 1))
    thresholds = torch.where(top_k < vocab_size, kth, -torch.inf)
    probs = torch.where(torch.arange(count, device=logits.device) < top_k, best, -torch.inf).exp()
    cumulative = probs.cumsum(dim=-1)
    mass = torch.where(top_k < vocab_size, cumulative[:, -1:], 1.0)
    in_nucleus = (cumulative - probs < top_p * mass).sum(dim=-1, keepdim=True).clamp(min=1)
    last = best.gather(1, in_nucleus - 1)
    thresholds = torch.where(top_p < 1, torch.maximum(thresholds, last), thresholds)
    thresholds = torch.maximum(thresholds, best[:, :1] + log_min_p)
    short = ((top_p < 1) & (top_k >= vocab_size) & (cumulative[:, -1:] < top_p)).squeeze(1)
    if logits.is_cpu and count < vocab_size and bool(short.any()):
        rest = logits[short]
        keep_likely(rest, top_k[short], top_p[short], log_min_p[short], vocab_size)
        logits[short] = rest
        thresholds = torch.where(short[:, None], -torch.inf, thresholds)
    logits.masked_fill_(log_probs < thresholds, -torch.inf)


def _largest(values: Tensor, count: int) -> Tensor:
    """The ``count`` largest of each row, (rows, count), descending."""
    if values.is_cpu and count == values.shape[1]:  # 0.2 ms for 49152 values; torch takes 1.5
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return values.topk(count, dim=-1).values


def prompt_logprobs(logits: Tensor, targets: npt.NDArray[np.int64], count: int) -> Logprobs:
    """Log-probabilities of ``targets`` (num_rows,), and of the ``count`` most likely tokens, under logits. Waits."""
    ids, values = _scores(logits.log_softmax(dim=-1), upload(targets, logits.device), min(count, logits.shape[1]))
    return Logprobs(ids.cpu().numpy().astype(np.uint32), values.cpu().numpy())


def _scores(log_probs: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities, (num_rows, 1 + count) each: the ``chosen`` (num_rows,), then the most likely ones."""
    ids = torch.cat([chosen[:, None], log_probs.topk(count, dim=-1).indices], dim=1)
    return ids, log_probs.gather(1, ids)
