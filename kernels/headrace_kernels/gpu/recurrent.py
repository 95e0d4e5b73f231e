"""Launches the ops of layers with recurrent state; torch for sizes that the kernels were not written for."""

import torch
from torch import Tensor

from headrace_kernels.arguments import check_conv, check_delta
from headrace_kernels.gpu.kernels import recurrent as kernels
from headrace_kernels.gpu.tensors import FLOATS, power_of_2, rows
from headrace_kernels.meta import StateMeta
from headrace_kernels.reference import recurrent as reference

_LARGEST_WIDTH = 16  # taps of a convolution
_LARGEST_SIZE = 256  # largest size of a key: a program has the whole key
_COLUMNS = 16  # columns of a state, per program of one warp
_CHANNELS = 128  # channels of a convolution, per program
_TOKENS = 8  # that it computes at once


def causal_conv(
    x: Tensor, weight: Tensor, pool: Tensor, meta: StateMeta, bias: Tensor | None = None, silu: bool = False
) -> Tensor:
    check_conv(x, weight, pool, meta, bias)
    (tokens, channels), width = x.shape, weight.shape[1]
    floats = (x, weight, pool) if bias is None else (x, weight, pool, bias)
    if not {part.dtype for part in floats} <= FLOATS or not 1 < width <= _LARGEST_WIDTH or pool.stride(2) != 1:
        return reference.causal_conv(x, weight, pool, meta, bias, silu)
    out, x, weight = torch.zeros(tokens, channels, dtype=x.dtype, device=x.device), rows(x), weight
    pieces = meta.reads.shape[0]
    if tokens and pieces:
        kernels.causal_conv[(pieces, -(-channels // _CHANNELS))](
            out, x, weight, x if bias is None else bias.contiguous(), pool, *pieces_of(meta), pieces, x.stride(0),
            channels, weight.stride(0), weight.stride(1), pool.stride(0), pool.stride(1),
            WIDTH=width, KEPT=power_of_2(width - 1), BLOCK_T=_TOKENS, BLOCK_C=_CHANNELS,
            HAS_BIAS=bias is not None, SILU=silu, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, pool: Tensor, meta: StateMeta
) -> Tensor:
    check_delta(query, key, value, decay, beta, pool, meta)
    floats = (query, key, value, decay, beta)
    (tokens, heads, columns), (key_heads, size) = value.shape, key.shape[1:]
    known = {part.dtype for part in floats} <= FLOATS and pool.dtype is torch.float32 and pool[0].is_contiguous()
    if not known or size > _LARGEST_SIZE:
        return reference.delta_rule(query, key, value, decay, beta, pool, meta)
    query, key, value = rows(query), rows(key), rows(value)
    by_channel = decay.dim() == 3
    decay = rows(decay) if by_channel else decay
    out = torch.zeros(tokens, heads, columns, dtype=torch.float32, device=value.device)
    pieces = meta.reads.shape[0]
    if tokens and pieces:
        kernels.delta_rule[(pieces, heads, -(-columns // _COLUMNS))](
            out, query, key, value, decay, beta, pool, *pieces_of(meta), pieces, size**-0.5,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            decay.stride(0), decay.stride(1), beta.stride(0), beta.stride(1), pool.stride(0),
            HEADS=heads, REPEAT=heads // key_heads, DIM=size, D_PAD=power_of_2(size), COLUMNS=columns,
            BLOCK_E=_COLUMNS, PER_CHANNEL=by_channel, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def pieces_of(meta: StateMeta) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors of the meta, as the kernels read them."""
    return meta.query_starts.contiguous(), meta.reads.contiguous(), meta.writes.contiguous()
