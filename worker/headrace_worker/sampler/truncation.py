"""min-p, top-k and top-p, in this order, and sampling from the remaining tokens.

Each of the three keeps a set of the most probable tokens, so together they amount to a threshold: every token at least
as probable as it is kept (all equal ones too). The threshold is searched among a few candidates first; a row whose kept
tokens might not all be among them is computed again with more, in the end with the whole vocabulary. The result does
not depend on the number of candidates: sums run in sorted order, and noise belongs to the token id.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace_kernels import gumbel_noise_at, row_logsumexp
from headrace_worker.core.plan import RowInit
from headrace_worker.sampler.batch import SampleBatch

FIRST_CANDIDATES = 64
MORE_CANDIDATES = 16  # times as many in the next attempt


@dataclass(slots=True, frozen=True)
class Truncation:
    """Options of A rows, [A, 1] each; off: top_k = V, top_p = 1, log_min_p = -inf."""

    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    cuts: bool = True  # False when no row uses top_k or min_p, and their part can be left out

    def select(self, rows: Tensor) -> "Truncation":
        """The options of some of the rows."""
        return Truncation(self.top_k[rows], self.top_p[rows], self.log_min_p[rows], self.cuts)


class TruncationState:
    """Per row top-k, top-p and min-p; rows that use none of them are not stored."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.rows: dict[int, tuple[int, float, float]] = {}

    def init(self, init: RowInit) -> None:
        """Store a row's options."""
        sampling = init.sampling
        top_k = sampling.top_k if 0 < sampling.top_k < self._vocab_size else self._vocab_size
        if top_k < self._vocab_size or sampling.top_p < 1.0 or sampling.min_p > 0.0:
            self.rows[init.row] = (top_k, sampling.top_p, sampling.min_p)

    def free(self, row: int) -> None:
        """Remove a row's options."""
        self.rows.pop(row, None)

    def gather(self, batch: SampleBatch, users: list[int]) -> Truncation:
        """Options of the batch's rows ``users``."""
        columns = list(zip(*(self.rows[batch.rows[i]] for i in users), strict=True))
        top_k = np.array(columns[0], np.int64)[:, None]
        top_p, min_p = (np.array(column, np.float32)[:, None] for column in columns[1:])
        cuts = bool((top_k < self._vocab_size).any() or min_p.any())
        k, p, lowest = batch.tensors(top_k, top_p, min_p)
        return Truncation(k, p, lowest.log(), cuts)


def draw_truncated(scores: Tensor, keys: Tensor, options: Truncation) -> Tensor:
    """Tokens [A] int64 from scores [A, V] (logits over temperature) and noise keys [A] int64."""
    vocab = scores.shape[1]
    log_total = row_logsumexp(scores)[:, None]
    if scores.is_cuda:
        # Testing whether more are needed would wait for the device.
        return _attempt(scores, keys, options, log_total, vocab)[0]
    candidates = min(FIRST_CANDIDATES, vocab)
    tokens, complete = _attempt(scores, keys, options, log_total, candidates)
    while candidates < vocab and not bool(complete.all()):
        candidates = min(candidates * MORE_CANDIDATES, vocab)
        again = (~complete).nonzero().flatten()
        tokens[again], complete[again] = _attempt(
            scores[again], keys[again], options.select(again), log_total[again], candidates
        )
    return tokens


def _attempt(
    scores: Tensor, keys: Tensor, options: Truncation, log_total: Tensor, candidates: int
) -> tuple[Tensor, Tensor]:
    """(tokens [A], whether all kept tokens of a row were among the candidates [A])."""
    vocab = scores.shape[1]
    values, ids = scores.topk(candidates, dim=-1)  # [A, C], best first
    peak = values[:, :1]
    weights = torch.exp(values - peak)
    total = torch.exp(log_total - peak)
    if options.cuts:
        kth = values.gather(1, options.top_k.clamp(max=candidates) - 1)
        top_k_on = options.top_k < vocab
        kept = (values >= peak + options.log_min_p) & ((values >= kth) | ~top_k_on | (options.top_k > candidates))
        cut = top_k_on | (options.log_min_p > float("-inf"))
        weights *= kept
    mass = weights.cumsum(-1)
    if options.cuts:
        total = torch.where(cut, mass[:, -1:], total)
    before = torch.cat((torch.zeros_like(peak), mass[:, :-1]), dim=-1)
    within = (before < options.top_p * total) | (options.top_p >= 1.0)
    if options.cuts:
        within &= kept
    threshold = values.gather(1, within.sum(-1, keepdim=True).clamp(min=1) - 1)
    drawable = values >= threshold

    noisy = torch.where(drawable, values + gumbel_noise_at(keys, ids), float("-inf"))
    tokens = ids.gather(1, noisy.argmax(-1, keepdim=True))[:, 0]
    # If the last candidate is kept, more may follow, tied ones too; if it counts, the sum is incomplete.
    more_needed = drawable[:, -1]
    if options.cuts:
        more_needed = more_needed | (kept[:, -1] & cut[:, 0])
    return tokens, ~more_needed
