"""The C++ ops of layers with recurrent state: on a CPU, states in float32; the rest goes to torch."""

import torch
from torch import Tensor

from headrace_kernels.arguments import check_conv, check_delta
from headrace_kernels.cpu.library import check_status, load
from headrace_kernels.meta import StateMeta
from headrace_kernels.reference import recurrent as reference

_causal_conv, _delta_rule = load().headrace_causal_conv, load().headrace_delta_rule
_TYPES = (torch.float32, torch.bfloat16)


def causal_conv(
    x: Tensor, weight: Tensor, pool: Tensor, meta: StateMeta, bias: Tensor | None = None, silu: bool = False
) -> Tensor:
    check_conv(x, weight, pool, meta, bias)
    tensors = [x, weight, pool, *(() if bias is None else (bias,))]
    same = all(tensor.is_cpu and tensor.dtype is x.dtype for tensor in tensors) and x.dtype in _TYPES
    if not (same and pool.is_contiguous() and _fits(meta)):
        return reference.causal_conv(x, weight, pool, meta, bias, silu)
    x = x if x.stride(1) == 1 else x.contiguous()
    taps, bias = weight.t().contiguous(), None if bias is None else bias.contiguous()
    (tokens, channels), width = x.shape, weight.shape[1]
    out = torch.empty(tokens, channels, dtype=x.dtype)
    status = _causal_conv(
        out.data_ptr(), x.data_ptr(), x.stride(0), taps.data_ptr(), None if bias is None else bias.data_ptr(),
        pool.data_ptr(), len(pool), tokens, channels, width, silu, x.dtype is torch.bfloat16, *_sequences(meta),
        torch.get_num_threads(),
    )  # fmt: skip
    check_status("causal_conv", status)
    return out


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, pool: Tensor, meta: StateMeta
) -> Tensor:
    check_delta(query, key, value, decay, beta, pool, meta)
    plain = pool.is_contiguous() and pool.dtype is torch.float32 and pool.is_cpu and value.is_cpu
    if not (plain and _fits(meta)):
        return reference.delta_rule(query, key, value, decay, beta, pool, meta)
    query, key, value = _heads(query), _heads(key), _heads(value)
    decay, beta = decay.float().contiguous(), beta.float().contiguous()
    (tokens, key_heads, rows), (heads, columns) = key.shape, value.shape[1:]
    out = torch.empty(tokens, heads, columns)
    status = _delta_rule(
        out.data_ptr(), query.data_ptr(), query.stride(0), key.data_ptr(), key.stride(0), value.data_ptr(),
        value.stride(0), decay.data_ptr(), decay.dim() == 3, beta.data_ptr(), pool.data_ptr(), len(pool), tokens,
        key_heads, heads, rows, columns, *_sequences(meta), torch.get_num_threads(),
    )  # fmt: skip
    check_status("delta_rule", status)
    return out


def _fits(meta: StateMeta) -> bool:
    parts = (meta.query_starts, meta.reads, meta.writes)
    return all(part.is_cpu and part.dtype is torch.int32 and part.is_contiguous() for part in parts)


def _sequences(meta: StateMeta) -> tuple[int, int, int, int]:
    return meta.query_starts.data_ptr(), meta.reads.data_ptr(), meta.writes.data_ptr(), len(meta.reads)


def _heads(x: Tensor) -> Tensor:
    """x [T, H, D] in float32 with the heads of a token side by side: a view where the strides allow it."""
    x = x.float()
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
