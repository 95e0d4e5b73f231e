"""Tensor operations of Headrace: each op has a torch reference, and faster backends where they are worthwhile."""

from headrace_kernels.catalog import describe, find_slow_backends
from headrace_kernels.invariant import InvariantLinear
from headrace_kernels.meta import AttentionMeta, DrawOptions
from headrace_kernels.ops import (
    add_rms_norm,
    draw,
    gelu_mul,
    paged_attention,
    rms_norm,
    rope_write_kv,
    row_logsumexp,
    silu_mul,
    write_kv,
)

__all__ = [
    "AttentionMeta",
    "DrawOptions",
    "InvariantLinear",
    "add_rms_norm",
    "describe",
    "draw",
    "find_slow_backends",
    "gelu_mul",
    "paged_attention",
    "rms_norm",
    "rope_write_kv",
    "row_logsumexp",
    "silu_mul",
    "write_kv",
]
