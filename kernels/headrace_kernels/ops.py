"""The public ops. Each call runs on the best backend that is here and fits its tensors (``describe()`` names it).

Shape letters are explained in ``headrace_kernels.meta``. Inputs may be strided views; outputs are contiguous.
"""

from torch import Tensor

from headrace_kernels import catalog
from headrace_kernels.meta import AttentionMeta


def write_kv(key: Tensor, value: Tensor, pool: Tensor, slots: Tensor) -> None:
    """Stores key and value [T, K, D] of new tokens into one layer's pool [2, B, K, P, D] at ``slots`` [T] int64."""
    catalog.WRITE_KV.best()(key, value, pool, slots)


def paged_attention(
    query: Tensor,
    pool: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of query [T, H, D] over one layer's pool [2, B, K, P, D] -> [T, H, D].

    H is a multiple of K; query head h reads KV head h // (H / K). The new tokens must already be in the pool.
    window: keys a query sees, itself included (0 = all). softcap: scores become ``softcap * tanh(scores / softcap)``
    (0 = off). sinks: [H] logits that take part in each softmax without a value.
    """
    return catalog.PAGED_ATTENTION.best()(query, pool, meta, scale=scale, window=window, softcap=softcap, sinks=sinks)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N] divided by its root mean square over N, times weight [N]."""
    return catalog.RMS_NORM.best()(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both new tensors [..., N]."""
    return catalog.ADD_RMS_NORM.best()(x, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of merged [..., 2 I] -> [..., I]."""
    return catalog.SILU_MUL.best()(gate_up)


def silu_mul_pair(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of two tensors [..., I]."""
    return catalog.SILU_MUL_PAIR.best()(gate, up)


def apply_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of query [T, H, D] and key [T, K, D] by cos, sin [T, R]: half-rotation of the first R of D.

    May write into query and key; use what it returns.
    """
    return catalog.APPLY_ROPE.best()(query, key, cos, sin)


def row_logsumexp(scores: Tensor) -> Tensor:
    """log(sum(exp(scores))) of scores [R, V] -> [R], in an order that depends on V alone; at least one is finite."""
    return catalog.ROW_LOGSUMEXP.best()(scores)


def gumbel_noise(keys: Tensor, vocab: int) -> Tensor:
    """Gumbel noise [R, vocab] float32 from keys [R] int64: the same bits on any device and in any batch."""
    return catalog.GUMBEL_NOISE.best()(keys, vocab)


def gumbel_noise_at(keys: Tensor, ids: Tensor) -> Tensor:
    """The entries ids [R, N] int64 of ``gumbel_noise(keys, ...)``."""
    return catalog.GUMBEL_NOISE_AT.best()(keys, ids)


def gumbel_argmax(scores: Tensor, keys: Tensor) -> Tensor:
    """argmax [R] int64 of scores [R, V] float32 + noise; -inf entries are never drawn."""
    return catalog.GUMBEL_ARGMAX.best()(scores, keys)
