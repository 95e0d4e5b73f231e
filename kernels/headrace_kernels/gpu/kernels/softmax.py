"""Reductions of whole logit rows."""

import triton
import triton.language as tl


@triton.jit
def row_logsumexp(out, scores, stride, V: tl.constexpr, BLOCK: tl.constexpr):
    """log(sum(exp)) of scores [rows, V], twice over the row: the peak, then the sum. Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    lane = tl.arange(0, BLOCK)
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    for base in range(0, V, BLOCK):
        x = tl.load(scores + base + lane, mask=base + lane < V, other=float("-inf")).to(tl.float32)
        peaks = tl.maximum(peaks, x)
    peak = tl.max(peaks, 0)
    sums = tl.full([BLOCK], 0.0, tl.float32)
    for base in range(0, V, BLOCK):
        x = tl.load(scores + base + lane, mask=base + lane < V, other=float("-inf")).to(tl.float32)
        sums += tl.exp(x - peak)
    tl.store(out + row, (peak + tl.log(tl.sum(sums, 0))).to(out.dtype.element_ty))
