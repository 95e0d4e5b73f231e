"""Every op with its backends, best first."""

import importlib
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace_kernels.cpu import library
from headrace_kernels.gpu import availability
from headrace_kernels.meta import AttentionMeta, DrawOptions, HeadNorms, StateMeta
from headrace_kernels.packed import PackedWeight
from headrace_kernels.registry import Backend, Op
from headrace_kernels.rounded import Rounded, ScaledWeight


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


class UnevenAttentionRun(Protocol):
    """Signature of attention to keys and values of different sizes in every backend."""

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        meta: AttentionMeta,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
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
        norms: HeadNorms | None = None,
    ) -> Tensor: ...


_FAST = {
    "triton": ("gpu", availability.missing, frozenset({"cuda"})),
    "cpu": ("cpu", library.missing, frozenset({"cpu"})),
}


def _op(module: str, name: str, *, fast: tuple[str, ...] = ("triton", "cpu")) -> Op[Any]:
    """An op with its torch reference and the `fast` backends that it has; module and function names are the same in
    every backend's folder. Tensors of a device without a fast backend take the reference.
    """

    def loader(folder: str) -> Callable[[], Any]:
        return lambda: getattr(importlib.import_module(f"headrace_kernels.{folder}.{module}"), name)

    backends = []
    for backend in fast:
        folder, missing, devices = _FAST[backend]
        backends.append(Backend(backend, loader(folder), missing, devices))
    return Op(name, *backends, Backend("torch", loader("reference")))


WRITE_KV: Op[WriteRun] = _op("cache", "write_kv")
ROPE_WRITE_KV: Op[RopeWriteRun] = _op("cache", "rope_write_kv")
PAGED_ATTENTION: Op[AttentionRun] = _op("attention", "paged_attention")
WRITE_PART: Op[Callable[[Tensor, Tensor, Tensor], None]] = _op("cache", "write_part", fast=("triton",))
UNEVEN_ATTENTION: Op[UnevenAttentionRun] = _op("attention", "uneven_attention")
SELECT_KEYS: Op[Callable[[Tensor, Tensor, Tensor, AttentionMeta, int], tuple[Tensor, Tensor]]] = _op(
    "attention", "select_keys", fast=("cpu",)
)
RMS_NORM: Op[Callable[[Tensor, Tensor, float], Tensor]] = _op("elementwise", "rms_norm")
ADD_RMS_NORM: Op[Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]] = _op("elementwise", "add_rms_norm")
ROPE_ANGLES: Op[Callable[[Tensor, Tensor, float, torch.dtype], tuple[Tensor, Tensor]]] = _op(
    "elementwise", "rope_angles", fast=("triton",)
)
SILU_MUL: Op[Callable[[Tensor], Tensor]] = _op("elementwise", "silu_mul")
GELU_MUL: Op[Callable[[Tensor], Tensor]] = _op("elementwise", "gelu_mul", fast=("cpu",))
SIGMOID: Op[Callable[[Tensor], Tensor]] = _op("elementwise", "sigmoid", fast=("cpu",))
SOFTPLUS: Op[Callable[[Tensor], Tensor]] = _op("elementwise", "softplus", fast=("cpu",))
ROW_LOGSUMEXP: Op[Callable[[Tensor], Tensor]] = _op("softmax", "row_logsumexp")
PACKED_ROWS: Op[Callable[[PackedWeight, Tensor], Tensor]] = _op("packed", "packed_rows", fast=("cpu",))
PACKED_MATMUL: Op[Callable[[Tensor, PackedWeight, Tensor | None, bool], Tensor]] = _op(
    "packed", "packed_matmul", fast=("cpu",)
)
ROUND_ROWS: Op[Callable[[Tensor, bool], Rounded]] = _op("rounded", "round_rows", fast=("triton",))
ROUNDED_RMS_NORM: Op[Callable[[Tensor, Tensor | None, Tensor, float, bool], tuple[Rounded, Tensor]]] = _op(
    "rounded", "rounded_rms_norm", fast=("triton",)
)
ROUNDED_SILU_MUL: Op[Callable[[Tensor, bool], Rounded]] = _op("rounded", "rounded_silu_mul", fast=("triton",))
SCALED_MATMUL: Op[Callable[[Rounded, ScaledWeight, Tensor | None, torch.dtype], Tensor]] = _op(
    "rounded", "scaled_matmul", fast=("triton",)
)
CAUSAL_CONV: Op[Callable[[Tensor, Tensor, Tensor, StateMeta, Tensor | None, bool], Tensor]] = _op(
    "recurrent", "causal_conv"
)
DELTA_RULE: Op[Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, StateMeta], Tensor]] = _op(
    "recurrent", "delta_rule"
)
SSD: Op[Callable[..., Tensor]] = _op("scans", "ssd")
SELECTIVE_SCAN: Op[Callable[..., Tensor]] = _op("scans", "selective_scan")
GATED_RMS_NORM: Op[Callable[[Tensor, Tensor, Tensor, float, int | None, bool], Tensor]] = _op("scans", "gated_rms_norm")
DRAW: Op[Callable[[Tensor, Tensor, Tensor, DrawOptions], tuple[Tensor, Tensor]]] = _op("draw", "draw")

ALL: tuple[Op[Any], ...] = tuple(value for value in list(globals().values()) if isinstance(value, Op))


def find_slow_backends() -> list[str]:
    """A sentence for each kind of device of this machine on which torch runs in place of our kernels, and why."""
    found = []
    if (reason := library.missing()) is not None:
        found.append(f"CPU kernels: torch only, several times slower, since {reason}.")
    if torch.cuda.is_available() and (reason := availability.missing()) is not None:
        found.append(f"GPU kernels: torch only, much slower, since {reason}.")
    return found


def describe() -> list[str]:
    """Sentences for the start-up notes: which backends run, and how to enable faster ones."""
    notes = find_slow_backends()
    if library.missing() is None:
        notes.append(f"CPU kernels: {library.description()}.")
    if torch.cuda.is_available() and availability.missing() is None:
        notes.append("GPU kernels: Triton.")
    configured = os.environ.get("GOMP_SPINCOUNT") or os.environ.get("OMP_WAIT_POLICY")
    if not configured and torch.get_num_threads() > 1:
        notes.append(
            "OpenMP threads spin for long while they wait, which is many times slower where other processes share the "
            "cores; set GOMP_SPINCOUNT=2000 before start."
        )
    return notes
