"""Launches the reductions of logit rows."""

import torch
from torch import Tensor

from headrace_kernels.arguments import check_scores
from headrace_kernels.gpu.kernels import softmax as kernels
from headrace_kernels.gpu.tensors import FLOATS, rows
from headrace_kernels.reference import softmax as reference

_BLOCK = 4096


def row_logsumexp(scores: Tensor) -> Tensor:
    check_scores("row_logsumexp", scores)
    if scores.dtype not in FLOATS:
        return reference.row_logsumexp(scores)
    scores = rows(scores)
    count, size = scores.shape
    out = torch.empty(count, dtype=scores.dtype, device=scores.device)
    if count:
        kernels.row_logsumexp[(count,)](out, scores, scores.stride(0), size, _BLOCK, num_warps=8, enable_fp_fusion=True)
    return out
