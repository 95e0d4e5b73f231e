"""State space models and their gated norm, in plain torch: token by token, so that no row depends on its batch.

Shape letters: H heads, E channels of a head, G groups, D size of the state of a channel, N slots.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_kernels.meta import StateMeta
from headrace_kernels.reference.recurrent import pieces


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
    """x [T, H, E], dt [T, H], decay [H], key, query [T, G, D], skip, dt_bias [H], pool [N, H, E, D] -> [T, H, E].

    All in float32. Per head and token, with step = softplus(dt + dt_bias) within dt_limit:
    S = exp(step decay) S + step x key; the output is S query + skip x.
    """
    heads = x.shape[1]
    step = _softplus(dt, dt_bias).clamp(*dt_limit)
    k, q = (y.float().repeat_interleave(heads // y.shape[1], 1)[:, :, None] for y in (key, query))
    u = x.float()
    kept, added = (step * decay.float()).exp()[..., None, None], (step[..., None] * u)[..., None]
    out = torch.zeros_like(u)
    for start, stop, read, write in pieces(meta):
        state = pool[read]
        for token in range(start, stop):
            state = state * kept[token] + added[token] * k[token]
            out[token] = (state * q[token]).sum(-1)
        if write:
            pool[write] = state
    return out if skip is None else out + skip.float()[:, None] * u


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
    """x, dt, gate [T, C], decay [C, D], key, query [T, D], skip, dt_bias [C], pool [N, C, D] -> [T, C].

    All in float32. Per channel and token, with step = softplus(dt + dt_bias): S = exp(step decay) S + step x key; the
    output is S query + skip x, times silu(gate).
    """
    step = _softplus(dt, dt_bias)
    u, k, q, rates = x.float(), key.float(), query.float(), decay.float()
    out = torch.zeros_like(u)
    for start, stop, read, write in pieces(meta):
        state = pool[read]
        for token in range(start, stop):
            pace = step[token, :, None]
            state = (pace * rates).exp() * state + pace * u[token, :, None] * k[token]
            out[token] = (state * q[token]).sum(-1)
        if write:
            pool[write] = state
    if skip is not None:
        out = out + skip.float() * u
    return out if gate is None else out * F.silu(gate.float())


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int | None = None, gate_first: bool = True
) -> Tensor:
    """x, gate [..., N], weight [N]: x silu(gate), or x, divided by its root mean square over groups; see the op."""
    wide, factor = x.float(), F.silu(gate.float())
    parts = (wide * factor if gate_first else wide).reshape(*x.shape[:-1], -1, group or weight.shape[0])
    normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)
    out = weight * normed.flatten(-2).to(x.dtype)
    return out if gate_first else (out * factor).to(x.dtype)


def _softplus(dt: Tensor, bias: Tensor | None) -> Tensor:
    return F.softplus(dt.float() if bias is None else dt.float() + bias.float())
