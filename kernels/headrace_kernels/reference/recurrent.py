"""Layers with recurrent state, in plain torch: token by token, so that a row's result does not depend on its batch."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_kernels.meta import StateMeta


def causal_conv(
    x: Tensor, weight: Tensor, pool: Tensor, meta: StateMeta, bias: Tensor | None = None, silu: bool = False
) -> Tensor:
    """x [T, C] under taps weight [C, W] and its last W - 1 inputs in the pool [N, W - 1, C] -> [T, C].

    Sums are in float32.
    """
    taps = weight.t().float()
    out = torch.zeros_like(x)
    for start, stop, read, write in pieces(meta):
        window = torch.cat([pool[read], x[start:stop]])
        total = taps.new_zeros(stop - start, x.shape[1]) if bias is None else bias.float().expand(stop - start, -1)
        for tap in range(len(taps)):
            total = total + window[tap : tap + stop - start].float() * taps[tap]
        out[start:stop] = F.silu(total) if silu else total
        if write:
            pool[write] = window[stop - start :]
    return out


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, pool: Tensor, meta: StateMeta
) -> Tensor:
    """query, key [T, K, D], value [T, H, E], decay [T, H] or [T, H, D], beta [T, H], pool [N, H, D, E] -> [T, H, E].

    All in float32. Per head and token: S = exp(decay) S; S += key (beta (value - key S)); the output is query S / D^½.
    Query and key are divided by their norms.
    """
    heads, dim = value.shape[1], key.shape[2]
    repeat = heads // key.shape[1]
    q, k = (_normed(x.float()).repeat_interleave(repeat, 1) for x in (query, key))
    q = q * dim**-0.5
    v, b, kept = value.float(), beta.float(), decay.float().exp()
    kept = kept[..., None, None] if kept.dim() == 2 else kept[..., None]
    out = torch.zeros_like(v)
    for start, stop, read, write in pieces(meta):
        state = pool[read]
        for token in range(start, stop):
            state = state * kept[token]
            found = (state * k[token, :, :, None]).sum(1)
            change = (v[token] - found) * b[token, :, None]
            state = state + k[token, :, :, None] * change[:, None, :]
            out[token] = (state * q[token, :, :, None]).sum(1)
        if write:
            pool[write] = state
    return out


def pieces(meta: StateMeta) -> Iterator[tuple[int, int, int, int]]:
    """The tokens [start, stop) of each sequence that has some, and the slots that it reads and writes."""
    starts = meta.query_starts.tolist()
    for start, stop, read, write in zip(
        starts[:-1], starts[1:], meta.reads.tolist(), meta.writes.tolist(), strict=True
    ):
        if stop > start:
            yield start, stop, read, write


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)
