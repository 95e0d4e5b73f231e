"""The public ops. Each call runs on the best backend that is here and fits its tensors (``describe()`` names it).

Shape letters are explained in ``headrace_kernels.meta``. Inputs may be strided views; outputs are contiguous.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from headrace_kernels.meta import AttentionMeta
from headrace_kernels.reference import attention as reference_attention
from headrace_kernels.reference import elementwise as reference_elementwise
from headrace_kernels.reference import noise as reference_noise
from headrace_kernels.registry import Backend, Op


class AttentionRun(Protocol):
    """Signature of paged attention in every backend."""

    def __call__(
        self,
        query: Tensor,
        pool: Tensor,
        meta: AttentionMeta,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


PAGED_ATTENTION: Op[AttentionRun] = Op("paged_attention", Backend("torch", lambda: reference_attention.paged_attention))
WRITE_KV: Op[Callable[[Tensor, Tensor, Tensor, Tensor], None]] = Op(
    "write_kv", Backend("torch", lambda: reference_attention.write_kv)
)


def write_kv(key: Tensor, value: Tensor, pool: Tensor, slots: Tensor) -> None:
    """Stores key and value [T, K, D] of new tokens into one layer's pool [2, B, K, P, D] at ``slots`` [T] int64."""
    reference_attention.write_kv(key, value, pool, slots)


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
    return reference_attention.paged_attention(
        query, pool, meta, scale=scale, window=window, softcap=softcap, sinks=sinks
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N] divided by its root mean square over N, times weight [N]."""
    return reference_elementwise.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both new tensors [..., N]."""
    return reference_elementwise.add_rms_norm(x, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of merged [..., 2 I] -> [..., I]."""
    return reference_elementwise.silu_mul(gate_up)


def silu_mul_pair(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of two tensors [..., I]."""
    return reference_elementwise.silu_mul_pair(gate, up)


def apply_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of query [T, H, D] and key [T, K, D] by cos, sin [T, R]: half-rotation of the first R of D.

    May write into query and key; use what it returns.
    """
    return reference_elementwise.apply_rope(query, key, cos, sin)


def gumbel_noise(keys: Tensor, vocab: int) -> Tensor:
    """Gumbel noise [R, vocab] float32 from keys [R] int64: the same bits on any device and in any batch."""
    return reference_noise.gumbel_noise(keys, vocab)


def gumbel_noise_at(keys: Tensor, ids: Tensor) -> Tensor:
    """The entries ids [R, N] int64 of ``gumbel_noise(keys, ...)``."""
    return reference_noise.gumbel_noise_at(keys, ids)


def gumbel_argmax(scores: Tensor, keys: Tensor) -> Tensor:
    """argmax [R] int64 of scores [R, V] float32 + noise; -inf entries are never drawn."""
    return reference_noise.gumbel_argmax(scores, keys)


def describe() -> list[str]:
    """Sentences for the start-up notes: which backends run, and what would make them faster."""
    return ["Kernels: torch."]
