"""Launches the Gumbel noise: bit for bit the reference's, since no operation is fused and every division is exact."""

import torch
from torch import Tensor

from headrace_kernels.arguments import check_keys, check_scores
from headrace_kernels.gpu.kernels import noise as kernels
from headrace_kernels.gpu.tensors import power_of_2, rows
from headrace_kernels.reference import noise as reference

_BLOCK = 1024
_PIECE = 8192  # entries of a row per program of the argmax


def gumbel_noise_at(keys: Tensor, ids: Tensor) -> Tensor:
    """See ``headrace_kernels.ops.gumbel_noise_at``."""
    check_keys("gumbel_noise_at", keys, ids)
    if ids.dtype is not torch.int64:
        return reference.gumbel_noise_at(keys, ids)
    out = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
    count = out.numel()
    if count:
        kernels.gumbel_noise_at[(-(-count // _BLOCK),)](
            out, keys.contiguous(), ids.contiguous(), count, ids.shape[1], _BLOCK, num_warps=4, enable_fp_fusion=False
        )
    return out


def gumbel_argmax(scores: Tensor, keys: Tensor) -> Tensor:
    """See ``headrace_kernels.ops.gumbel_argmax``; noise is only computed where it can change the result."""
    check_scores("gumbel_argmax", scores)
    check_keys("gumbel_argmax", keys, scores)
    if scores.dtype is not torch.float32:
        return reference.gumbel_argmax(scores, keys)
    scores = rows(scores)
    count, vocab = scores.shape
    out = torch.empty(count, dtype=torch.int64, device=scores.device)
    if count == 0:
        return out
    pieces = -(-vocab // _PIECE)
    best = torch.empty(count, pieces, dtype=torch.float32, device=scores.device)
    best_index = torch.empty(count, pieces, dtype=torch.int32, device=scores.device)
    kernels.best_of_pieces[(count, pieces)](
        best, best_index, scores, keys.contiguous(), scores.stride(0), vocab, _PIECE, _BLOCK,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    kernels.best_of_row[(count,)](
        out, best, best_index, pieces, power_of_2(pieces), num_warps=1, enable_fp_fusion=False
    )
    return out
