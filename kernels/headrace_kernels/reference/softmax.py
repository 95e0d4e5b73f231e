"""Reductions of whole logit rows in plain torch."""

import torch
from torch import Tensor


def row_logsumexp(scores: Tensor) -> Tensor:
    """log(sum(exp(scores))) over the last dimension: [R, V] -> [R]."""
    return torch.logsumexp(scores, -1)
