"""Every op with its backends, best first."""

import importlib
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace_kernels.cpu import library
from headrace_kernels.gpu import availability
from headrace_kernels.meta import AttentionMeta
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
        kv_scale: Tensor | None = None,
        deterministic: bool = False,
    ) -> Tensor: ...


class WriteRun(Protocol):
    """Signature of the cache store in every backend."""

    def __call__(
        self, key: Tensor, value: Tensor, pool: Tensor, slots: Tensor, kv_scale: Tensor | None = None
    ) -> None: ...


class RopeWriteRun(Protocol):
    """Signature of rotary embedding and cache store in one."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        pool: Tensor,
        slots: Tensor,
        kv_scale: Tensor | None = None,
    ) -> Tensor: ...


def _backends(module: str, name: str) -> tuple[Backend[Any], ...]:
    """The implementations of an op, by its module and function name, which are the same in all folders."""

    def loader(folder: str) -> Callable[[], Any]:
        return lambda: getattr(importlib.import_module(f"headrace_kernels.{folder}.{module}"), name)

    return (
        Backend("triton", loader("gpu"), availability.missing, frozenset({"cuda"})),
        Backend("cpu", loader("cpu"), library.missing, frozenset({"cpu"})),
        Backend("torch", loader("reference")),
    )


WRITE_KV: Op[WriteRun] = Op("write_kv", *_backends("cache", "write_kv"))
ROPE_WRITE_KV: Op[RopeWriteRun] = Op("rope_write_kv", *_backends("cache", "rope_write_kv"))
PAGED_ATTENTION: Op[AttentionRun] = Op("paged_attention", *_backends("attention", "paged_attention"))
RMS_NORM: Op[Callable[[Tensor, Tensor, float], Tensor]] = Op("rms_norm", *_backends("elementwise", "rms_norm"))
ADD_RMS_NORM: Op[Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]] = Op(
    "add_rms_norm", *_backends("elementwise", "add_rms_norm")
)
SILU_MUL: Op[Callable[[Tensor], Tensor]] = Op("silu_mul", *_backends("elementwise", "silu_mul"))
SILU_MUL_PAIR: Op[Callable[[Tensor, Tensor], Tensor]] = Op("silu_mul_pair", *_backends("elementwise", "silu_mul_pair"))
APPLY_ROPE: Op[Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = Op(
    "apply_rope", *_backends("elementwise", "apply_rope")
)
ROW_LOGSUMEXP: Op[Callable[[Tensor], Tensor]] = Op("row_logsumexp", *_backends("softmax", "row_logsumexp"))
GUMBEL_NOISE: Op[Callable[[Tensor, int], Tensor]] = Op("gumbel_noise", *_backends("noise", "gumbel_noise"))
GUMBEL_NOISE_AT: Op[Callable[[Tensor, Tensor], Tensor]] = Op("gumbel_noise_at", *_backends("noise", "gumbel_noise_at"))
GUMBEL_ARGMAX: Op[Callable[[Tensor, Tensor], Tensor]] = Op("gumbel_argmax", *_backends("noise", "gumbel_argmax"))

ALL: tuple[Op[Any], ...] = (
    WRITE_KV,
    ROPE_WRITE_KV,
    PAGED_ATTENTION,
    RMS_NORM,
    ADD_RMS_NORM,
    SILU_MUL,
    SILU_MUL_PAIR,
    APPLY_ROPE,
    ROW_LOGSUMEXP,
    GUMBEL_NOISE,
    GUMBEL_NOISE_AT,
    GUMBEL_ARGMAX,
)


def describe() -> list[str]:
    """Sentences for the start-up notes: which backends run, and how to enable faster ones."""
    reason = library.missing()
    if reason is None:
        notes = ["CPU kernels: C++, compiled for this machine; attention over the paged cache, norms, rope, sampling."]
    else:
        notes = [f"CPU kernels: torch only, slower, since {reason}."]
    if torch.cuda.is_available():
        reason = availability.missing()
        if reason is None:
            notes.append("GPU kernels: Triton; attention over the paged cache, norms, rope, sampling.")
        else:
            notes.append(f"GPU kernels: torch only, much slower, since {reason}.")
    configured = os.environ.get("GOMP_SPINCOUNT") or os.environ.get("OMP_WAIT_POLICY")
    if not configured and torch.get_num_threads() > 1:
        notes.append(
            "OpenMP threads spin for long while they wait, which is many times slower where other processes share the "
            "cores; set GOMP_SPINCOUNT=2000 before start."
        )
    return notes
