"""The C++ Gumbel noise: bit for bit the reference's, on a CPU; other devices go to torch."""

import torch
from torch import Tensor

from headrace_kernels.arguments import check_keys, check_scores
from headrace_kernels.cpu.library import load
from headrace_kernels.reference import noise as reference

_gumbel_noise_at = load().headrace_gumbel_noise_at
_gumbel_argmax = load().headrace_gumbel_argmax


def gumbel_noise_at(keys: Tensor, ids: Tensor) -> Tensor:
    """See ``headrace_kernels.ops.gumbel_noise_at``."""
    check_keys("gumbel_noise_at", keys, ids)
    if not (keys.is_cpu and ids.is_cpu and ids.dtype is torch.int64):
        return reference.gumbel_noise_at(keys, ids)
    keys, ids = keys.contiguous(), ids.contiguous()
    out = torch.empty(ids.shape)
    _gumbel_noise_at(out.data_ptr(), keys.data_ptr(), ids.data_ptr(), *ids.shape)
    return out


def gumbel_argmax(scores: Tensor, keys: Tensor) -> Tensor:
    """See ``headrace_kernels.ops.gumbel_argmax``; noise is only computed where it can change the result."""
    check_scores("gumbel_argmax", scores)
    check_keys("gumbel_argmax", keys, scores)
    if not (scores.is_cpu and keys.is_cpu and scores.dtype is torch.float32):
        return reference.gumbel_argmax(scores, keys)
    keys = keys.contiguous()
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    rows, vocab = scores.shape
    out = torch.empty(rows, dtype=torch.int64)
    _gumbel_argmax(
        out.data_ptr(), scores.data_ptr(), scores.stride(0), keys.data_ptr(), rows, vocab, torch.get_num_threads()
    )
    return out
