"""The C++ state space models and their gated norm: in float32 on a CPU, whatever the inputs are in."""

import torch
from torch import Tensor

from headrace_kernels.arguments import check_gated_norm, check_selective_scan, check_ssd
from headrace_kernels.cpu.library import check_status, load
from headrace_kernels.meta import StateMeta
from headrace_kernels.reference import scans as reference

_ssd, _selective_scan = load().headrace_ssd, load().headrace_selective_scan
_gated_rms_norm = load().headrace_gated_rms_norm


def _rows(x: Tensor) -> Tensor:
    """x [T, ...] as [T, N] in float32 with contiguous rows: a view where the strides allow it."""
    x = x.float().flatten(1)
    return x if x.stride(1) == 1 else x.contiguous()


def _whole(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


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
    tokens, heads, channels = x.shape
    groups, size = key.shape[1:]
    out = torch.zeros(tokens, heads, channels)  # rows of no sequence stay so
    inputs, steps, keys, queries = _rows(x), _rows(dt), _rows(key), _rows(query)
    rates, skips, bias = _whole(decay), _whole(skip), _whole(dt_bias)
    status = _ssd(
        out.data_ptr(), inputs.data_ptr(), inputs.stride(0), steps.data_ptr(), steps.stride(0), _pointer(rates),
        keys.data_ptr(), keys.stride(0), queries.data_ptr(), queries.stride(0), _pointer(skips), _pointer(bias),
        *dt_limit, pool.data_ptr(), pool.shape[0], meta.query_starts.data_ptr(), meta.reads.data_ptr(),
        meta.writes.data_ptr(), meta.reads.shape[0], tokens, heads, channels, groups, size, torch.get_num_threads(),
    )  # fmt: skip
    check_status("ssd", status)
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
    tokens, channels = x.shape
    out = torch.zeros(tokens, channels)
    inputs, steps, keys, queries = _rows(x), _rows(dt), _rows(key), _rows(query)
    gates = None if gate is None else _rows(gate)
    rates, skips, bias = _whole(decay), _whole(skip), _whole(dt_bias)
    status = _selective_scan(
        out.data_ptr(), inputs.data_ptr(), inputs.stride(0), steps.data_ptr(), steps.stride(0), _pointer(rates),
        keys.data_ptr(), keys.stride(0), queries.data_ptr(), queries.stride(0), _pointer(skips), _pointer(gates),
        0 if gates is None else gates.stride(0), _pointer(bias), pool.data_ptr(), pool.shape[0],
        meta.query_starts.data_ptr(), meta.reads.data_ptr(), meta.writes.data_ptr(), meta.reads.shape[0], tokens,
        channels, key.shape[1], torch.get_num_threads(),
    )  # fmt: skip
    check_status("selective_scan", status)
    return out


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int | None = None, gate_first: bool = True
) -> Tensor:
    check_gated_norm(x, gate, weight, group)
    if not all(part.dtype is torch.float32 and part.is_cpu for part in (x, gate, weight)):
        return reference.gated_rms_norm(x, gate, weight, eps, group, gate_first)
    size = weight.shape[0]
    rows, gates, weight = _rows(x.reshape(-1, size)), _rows(gate.reshape(-1, size)), weight.contiguous()
    out = torch.empty(x.shape)
    _gated_rms_norm(
        out.data_ptr(), rows.data_ptr(), rows.stride(0), gates.data_ptr(), gates.stride(0), weight.data_ptr(),
        rows.shape[0], size, group or size, eps, gate_first, torch.get_num_threads(),
    )  # fmt: skip
    return out
