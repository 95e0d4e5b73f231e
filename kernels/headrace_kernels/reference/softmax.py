"""Reductions of whole logit rows in plain torch."""

import torch
from torch import Tensor


def row_logsumexp(scores: Tensor) -> Tensor:
    """log(sum(exp(scores))) over the last dimension: [R, V] -> [R]."""
    return torch.logsumexp(scores, -1)


def row_max(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The largest entry over the last dimension, and its index: [R, V] -> [R], [R]."""
    peaks, best = scores.max(-1)
    return peaks, best
