"""The C++ draw of tokens: bit for bit the reference's, on a CPU; other devices go to torch."""

import torch
from torch import Tensor

from headrace_kernels.arguments import check_draw
from headrace_kernels.cpu.library import load
from headrace_kernels.meta import DrawOptions
from headrace_kernels.reference import draw as reference

_draw = load().headrace_draw


def draw(logits: Tensor, rows: Tensor, positions: Tensor, options: DrawOptions) -> tuple[Tensor, Tensor]:
    """See ``headrace_kernels.ops.draw``; noise is only computed where it can change the result."""
    check_draw(logits, rows, positions, options)
    if not logits.is_cpu:
        return reference.draw(logits, rows, positions, options)
    logits = logits.float()
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, positions = rows.contiguous(), positions.contiguous()
    count, vocab = logits.shape
    tokens, peaks = torch.empty(count, dtype=torch.int64), torch.empty(count)
    _draw(
        tokens.data_ptr(), peaks.data_ptr(), logits.data_ptr(), logits.stride(0), rows.data_ptr(), positions.data_ptr(),
        options.numbers.data_ptr(), options.integers.data_ptr(), count, vocab, torch.get_num_threads(),
    )  # fmt: skip
    return tokens, peaks
