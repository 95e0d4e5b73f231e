"""The C++ norms, activation and rotary embedding: float32 on a CPU; the rest goes to torch."""

import torch
from torch import Tensor

from headrace_kernels.arguments import check_halves, check_norm, check_rope
from headrace_kernels.cpu.library import load
from headrace_kernels.reference import elementwise as reference

_rms_norm = load().headrace_rms_norm
_add_rms_norm = load().headrace_add_rms_norm
_activate = load().headrace_activate
_SILU, _GELU = 0, 1  # values of `Activation` in entries.h
_curve = load().headrace_curve
_rope = load().headrace_rope


def _rows(x: Tensor) -> Tensor:
    """x as [rows, N] with contiguous rows: a view where the strides allow it."""
    x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _fits(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_cpu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    check_norm(x, weight)
    if not (_fits(x) and _fits(weight)):
        return reference.rms_norm(x, weight, eps)
    weight = weight.contiguous()
    if x.is_contiguous():  # the usual case, worth 2 µs
        size, out = weight.numel(), torch.empty_like(x)
        count = x.numel() // size
        _rms_norm(out.data_ptr(), x.data_ptr(), size, weight.data_ptr(), count, size, eps, torch.get_num_threads())
        return out
    rows = _rows(x)
    count, size = rows.shape
    out = torch.empty(x.shape)
    _rms_norm(
        out.data_ptr(), rows.data_ptr(), rows.stride(0), weight.data_ptr(), count, size, eps, torch.get_num_threads()
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    check_norm(x, weight)
    if not (_fits(x) and _fits(residual) and _fits(weight) and x.shape == residual.shape):
        return reference.add_rms_norm(x, residual, weight, eps)
    weight = weight.contiguous()
    x, residual = x.contiguous(), residual.contiguous()
    size, out, total = weight.numel(), torch.empty_like(x), torch.empty_like(x)
    count = x.numel() // size
    _add_rms_norm(
        out.data_ptr(), total.data_ptr(), x.data_ptr(), size, residual.data_ptr(), size, weight.data_ptr(),
        count, size, eps, torch.get_num_threads(),
    )  # fmt: skip
    return out, total


def silu_mul(gate_up: Tensor) -> Tensor:
    check_halves(gate_up)
    return _activated(gate_up, _SILU) if _fits(gate_up) else reference.silu_mul(gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    check_halves(gate_up)
    return _activated(gate_up, _GELU) if _fits(gate_up) else reference.gelu_mul(gate_up)


def _activated(gate_up: Tensor, activation: int) -> Tensor:
    rows = _rows(gate_up)
    count, size = rows.shape[0], rows.shape[1] // 2
    out = torch.empty(*gate_up.shape[:-1], size)
    stride, start = rows.stride(0), rows.data_ptr()
    _activate(out.data_ptr(), start, stride, start + 4 * size, stride, count, size, activation, torch.get_num_threads())
    return out


def sigmoid(x: Tensor) -> Tensor:
    return _on_curve(x, False) if _fits(x) else reference.sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    return _on_curve(x, True) if _fits(x) else reference.softplus(x)


def _on_curve(x: Tensor, is_softplus: bool) -> Tensor:
    rows, out = _rows(x), torch.empty(x.shape)
    count, size = rows.shape
    _curve(out.data_ptr(), rows.data_ptr(), rows.stride(0), count, size, is_softplus, torch.get_num_threads())
    return out


def apply_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See ``headrace_kernels.reference.elementwise.apply_rope``; in place."""
    check_rope(query, key, cos, sin)
    if not (_fits(query) and _fits(key) and _fits(cos) and _fits(sin)):
        return reference.apply_rope(query, key, cos, sin)
    query = query if query.stride(2) == 1 else query.contiguous()
    key = key if key.stride(2) == 1 else key.contiguous()
    cos, sin = _rows(cos), _rows(sin)
    tokens, heads, _ = query.shape
    query_token, query_head, _ = query.stride()
    key_token, key_head, _ = key.stride()
    _rope(
        query.data_ptr(), query_token, query_head, heads, key.data_ptr(), key_token, key_head, key.shape[1],
        cos.data_ptr(), cos.stride(0), sin.data_ptr(), sin.stride(0), tokens, cos.shape[1], torch.get_num_threads(),
    )  # fmt: skip
    return query, key
