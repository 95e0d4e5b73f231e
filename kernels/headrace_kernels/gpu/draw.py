"""Launches the draw of tokens: bit for bit the reference's, since no operation is fused and every division is exact."""

import torch
from torch import Tensor

from headrace_kernels.arguments import check_draw
from headrace_kernels.gpu.kernels import draw as kernels
from headrace_kernels.gpu.tensors import FLOATS, power_of_2
from headrace_kernels.gpu.tensors import rows as with_rows
from headrace_kernels.meta import DrawOptions
from headrace_kernels.reference import draw as reference

_SUB = 512  # logits whose largest is kept: most of them are left out by it
_BLOCK = 2048  # logits that a program reads at once
_PIECE = 8192  # logits of a program
_TILE = 8  # times _SUB logits that the program of a row reads at once
_LOW_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # bits of float32 that are zero in the dtype


def draw(logits: Tensor, rows: Tensor, positions: Tensor, options: DrawOptions) -> tuple[Tensor, Tensor]:
    """See ``headrace_kernels.ops.draw``. Two launches, whatever the options."""
    check_draw(logits, rows, positions, options)
    if logits.dtype not in FLOATS:
        return reference.draw(logits, rows, positions, options)
    logits, rows, positions = with_rows(logits), rows.contiguous(), positions.contiguous()
    count, vocab = logits.shape
    pieces, subs = -(-vocab // _PIECE), -(-vocab // _SUB)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    tokens, peaks = new(count, dtype=torch.int64), new(count)
    if count == 0:
        return tokens, peaks
    best, best_index, sub_peaks = new(count, pieces), new(count, pieces, dtype=torch.int32), new(count, subs)
    chosen = rows, positions, options.numbers, options.integers
    kernels.draw_pieces[(count, pieces)](
        best, best_index, sub_peaks, logits, *chosen, logits.stride(0), vocab, _PIECE, _BLOCK, _SUB,
        num_warps=4, maxnreg=128, enable_fp_fusion=False,
    )  # fmt: skip
    kernels.decide[(count,)](
        tokens, peaks, best, best_index, sub_peaks, new(count, subs, dtype=torch.int32), logits, *chosen,
        logits.stride(0), vocab, pieces, power_of_2(pieces), _SUB, subs, power_of_2(subs), _TILE,
        _LOW_BITS[logits.dtype], num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens, peaks
