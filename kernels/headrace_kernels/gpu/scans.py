"""Launches state space models and their gated norm; torch for sizes that the kernels were not written for."""

import torch
from torch import Tensor

from headrace_kernels.arguments import check_gated_norm, check_selective_scan, check_ssd
from headrace_kernels.gpu.kernels import recurrent as kernels
from headrace_kernels.gpu.recurrent import pieces_of
from headrace_kernels.gpu.tensors import FLOATS, flat, power_of_2, rows
from headrace_kernels.meta import StateMeta
from headrace_kernels.reference import scans as reference

_LARGEST_SIZE = 256  # largest size of the state of a channel: a program has the whole state
_STATE = 4096  # numbers of a program's state, in the registers of four warps
_LARGEST_GROUP = 16384  # largest group of a norm


def ssd(
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    key: Tensor,
    query: Tensor,
    pool: Tensor,
    meta: StateMeta,
    skip: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    check_ssd(x, dt, decay, key, query, pool, meta, skip, dt_bias)
    (tokens, heads, channels), (groups, size) = x.shape, key.shape[1:]
    if not _known(x, dt, decay, key, query, skip, dt_bias) or size > _LARGEST_SIZE:
        return reference.ssd(x, dt, decay, key, query, pool, meta, skip, dt_bias, dt_limit)
    x, key, query, padded = rows(x), rows(key), rows(query), power_of_2(size)
    out = torch.zeros(tokens, heads, channels, dtype=torch.float32, device=x.device)
    pieces, block = meta.reads.shape[0], max(1, min(power_of_2(channels), _STATE // padded))
    if tokens and pieces:
        kernels.ssd[(pieces, heads, -(-channels // block))](
            out, x, dt, decay.contiguous(), key, query, _or(skip, x), _or(dt_bias, x), pool, *pieces_of(meta), pieces,
            float(dt_limit[0]), float(dt_limit[1]), x.stride(0), x.stride(1), dt.stride(0), dt.stride(1),
            key.stride(0), key.stride(1), query.stride(0), query.stride(1), pool.stride(0),
            HEADS=heads, REPEAT=heads // groups, CHANNELS=channels, BLOCK_E=block, DIM=size, D_PAD=padded,
            HAS_SKIP=skip is not None, HAS_BIAS=dt_bias is not None, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def selective_scan(
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    key: Tensor,
    query: Tensor,
    pool: Tensor,
    meta: StateMeta,
    skip: Tensor | None = None,
    gate: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> Tensor:
    check_selective_scan(x, dt, decay, key, query, pool, meta, skip, gate, dt_bias)
    (tokens, channels), size = x.shape, key.shape[1]
    if not _known(x, dt, decay, key, query, skip, gate, dt_bias) or size > _LARGEST_SIZE:
        return reference.selective_scan(x, dt, decay, key, query, pool, meta, skip, gate, dt_bias)
    x, dt, key, query, gates = rows(x), rows(dt), rows(key), rows(query), rows(_or(gate, x))
    out = torch.zeros(tokens, channels, dtype=torch.float32, device=x.device)
    padded = power_of_2(size)
    pieces, block = meta.reads.shape[0], max(1, _STATE // 2 // padded)
    if tokens and pieces:
        kernels.selective_scan[(pieces, -(-channels // block))](
            out, x, dt, decay.contiguous(), key, query, _or(skip, x), gates, _or(dt_bias, x), pool, *pieces_of(meta),
            pieces, channels, x.stride(0), dt.stride(0), key.stride(0), query.stride(0), gates.stride(0),
            pool.stride(0), BLOCK_C=block, DIM=size, D_PAD=padded, HAS_SKIP=skip is not None,
            HAS_GATE=gate is not None, HAS_BIAS=dt_bias is not None, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int | None = None, gate_first: bool = True
) -> Tensor:
    check_gated_norm(x, gate, weight, group)
    columns = weight.shape[0]
    group = group or columns
    if not x.dtype == gate.dtype == weight.dtype or x.dtype not in FLOATS or group > _LARGEST_GROUP or not x.numel():
        return reference.gated_rms_norm(x, gate, weight, eps, group, gate_first)
    out, wide, gates = torch.empty(x.shape, dtype=x.dtype, device=x.device), flat(x), flat(gate)
    kernels.gated_rms_norm[(wide.shape[0], columns // group)](
        out, wide, gates, weight.contiguous(), eps, wide.stride(0), gates.stride(0), columns, GROUP=group,
        BLOCK=power_of_2(group), GATE_FIRST=gate_first, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _known(*parts: Tensor | None) -> bool:
    return {part.dtype for part in parts if part is not None} <= FLOATS


def _or(part: Tensor | None, other: Tensor) -> Tensor:
    """The part; without one the kernels read none, and get another tensor."""
    return other if part is None else part.contiguous()
