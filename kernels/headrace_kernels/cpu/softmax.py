"""The C++ reductions of logit rows: float32 on a CPU; the rest goes to torch."""

import torch
from torch import Tensor

from headrace_kernels.arguments import check_scores
from headrace_kernels.cpu.library import load
from headrace_kernels.reference import softmax as reference

_row_logsumexp = load().headrace_row_logsumexp


def row_logsumexp(scores: Tensor) -> Tensor:
    check_scores("row_logsumexp", scores)
    if scores.dtype is not torch.float32 or not scores.is_cpu:
        return reference.row_logsumexp(scores)
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    rows, size = scores.shape
    out = torch.empty(rows)
    _row_logsumexp(out.data_ptr(), scores.data_ptr(), scores.stride(0), rows, size, torch.get_num_threads())
    return out
