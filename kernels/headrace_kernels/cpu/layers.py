"""Adjacent decoder layers in one C++ call: float32 on a CPU, with packed weights.

Shape letters: T tokens, N hidden size, H query heads, K key/value heads, D head size, M inputs of the last product.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace_kernels.arguments import KernelArgumentError
from headrace_kernels.cpu.library import check_status, load
from headrace_kernels.meta import AttentionMeta
from headrace_kernels.packed import PackedWeight

_P, _I, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


@dataclass(frozen=True)
class Product:
    """x @ weight.T + bias; bf16: x is rounded to bfloat16 first."""

    weight: PackedWeight
    bias: Tensor | None
    bf16: bool = False


@dataclass(frozen=True)
class Norm:
    """x / rms(x) * weight."""

    weight: Tensor  # [N] or, of heads, [D]
    eps: float


@dataclass(frozen=True)
class LayerWeights:
    """x + attention(norm(x)), then x + down(silu(gate) * up), gate and up being the halves of a product of norm(x)."""

    first_norm: Norm
    qkv: Product  # [(H + 2K) * D, N]
    query_norm: Norm | None  # both or none
    key_norm: Norm | None
    out: Product  # [N, H * D]
    second_norm: Norm
    gate_up: Product  # [2M, N]
    down: Product  # [N, M]
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float
    sinks: Tensor | None  # [H]

    def fits(self) -> bool:
        """Whether the C++ code is written for it."""
        group = self.heads // self.kv_heads
        norms = [norm.weight for norm in self._norms() if norm is not None]
        tensors = [*norms, *(part.bias for part in self.products() if part.bias is not None)]
        if self.sinks is not None:
            tensors.append(self.sinks)
        return (
            self.head_dim % 16 == 0
            and group <= 64
            and self.qkv.weight.outputs == (self.heads + 2 * self.kv_heads) * self.head_dim
            and self.out.weight.inputs == self.heads * self.head_dim
            and self.gate_up.weight.outputs == 2 * self.down.weight.inputs
            and self.gate_up.weight.inputs == self.qkv.weight.inputs
            and self.out.weight.outputs == self.down.weight.outputs == self.qkv.weight.inputs
            and (self.query_norm is None) == (self.key_norm is None)
            and all(x.is_cpu and x.dtype is torch.float32 and x.is_contiguous() for x in tensors)
        )

    def products(self) -> tuple[Product, Product, Product, Product]:
        """In the order of the layer."""
        return self.qkv, self.out, self.gate_up, self.down

    def _norms(self) -> tuple[Norm | None, ...]:
        return self.first_norm, self.second_norm, self.query_norm, self.key_norm


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("data", _P),
        ("bias", _P),
        ("outputs", _I),
        ("inputs", _I),
        ("form", _I),
        ("group", _I),
        ("wide", _I),
        ("minima", _I),
        ("in_pairs", _I),
        ("offset", _D),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _P) for name in ("first_norm", "second_norm", "query_norm", "key_norm", "sinks")),
        *((name, _I) for name in ("heads", "kv_heads", "head_dim")),
        *((name, _D) for name in ("first_eps", "second_eps", "query_eps", "key_eps", "scale", "softcap")),
    ]


class _Cache(ctypes.Structure):
    _fields_ = [
        ("pool", _P),
        *((name, _I) for name in ("pool_blocks", "block_size", "window")),
        *((name, _P) for name in ("query_starts", "seq_lens", "tables")),
        *((name, _I) for name in ("table_stride", "table_entries", "sequences")),
        ("slots", _P),
    ]


@dataclass(frozen=True)
class LayerCacheStep:
    """What a step has for one layer."""

    pool: Tensor  # [2, B, K, P, D]
    window: int  # 0 = all
    meta: AttentionMeta

    def fits(self) -> bool:
        """Whether the C++ code can read it."""
        meta = self.meta
        parts = (meta.query_starts, meta.seq_lens, meta.block_tables)
        return (
            self.pool.dtype is torch.float32
            and meta.slots.dtype is torch.int64
            and all(part.dtype is torch.int32 and part.is_cpu for part in parts)
            and (self.pool.is_cpu and meta.slots.is_cpu)
            and all(part.is_contiguous() for part in (self.pool, meta.slots, meta.query_starts, meta.seq_lens))
            and meta.block_tables.stride(1) == 1
        )


class Layers:
    """Layers of one shape, whose hidden states never leave C++ between them. Raises KernelBuildError."""

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        self.weights = tuple(layers)
        library = load()
        assert library.headrace_layer_bytes() == ctypes.sizeof(_Layer) + ctypes.sizeof(_Cache)
        self._run = library.headrace_layers
        first = self.weights[0]
        self._inputs, self._width = first.qkv.weight.inputs, first.qkv.weight.outputs
        self._space = 2 * first.qkv.weight.inputs + first.out.weight.inputs + 3 * first.down.weight.inputs
        self._kv = first.kv_heads, first.head_dim
        self._table = (_Layer * len(self.weights))(*map(_layer, self.weights))

    def __call__(
        self, hidden: Tensor, caches: Sequence[LayerCacheStep], cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """hidden [1, T, N], cos and sin [T, R] -> the last layer's hidden states, and all values [layers, T, K, D].

        Keys and values are written to the caches. Raises KernelArgumentError for tensors of other shapes.
        """
        kv_heads, head_dim = self._kv
        tokens = hidden.shape[1]
        if hidden.shape[2] != self._inputs or len(cos) != tokens or len(sin) != tokens or cos.shape[1] > head_dim:
            raise KernelArgumentError(
                f"layers: hidden {list(hidden.shape)}, cos {list(cos.shape)} and sin {list(sin.shape)} do not fit to "
                f"{self._inputs} inputs and heads of size {head_dim}. This is a bug: please report it."
            )
        plain = (x.dtype is torch.float32 and x.is_cpu and x.stride(-1) == 1 for x in (hidden, cos, sin))
        if not all(plain) or not all(cache.fits() for cache in caches):
            raise KernelArgumentError(
                "layers: the step is not in float32 on a CPU, in tensors without gaps. This is a bug: please report it."
            )
        for cache in caches:
            shape, slots = cache.pool.shape, len(cache.meta.slots)
            if (shape[2], shape[4]) != self._kv or slots != tokens:
                raise KernelArgumentError(
                    f"layers: {tokens} tokens with {kv_heads} KV heads of size {head_dim}, but the cache has {slots} "
                    f"slots, and {shape[2]} heads of size {shape[4]}. This is a bug: please report it."
                )
        out = hidden.clone(memory_format=torch.contiguous_format)
        qkv = torch.empty(len(self.weights), tokens, self._width)
        space = torch.empty(tokens * self._space)
        table = (_Cache * len(caches))(*map(_cache, caches))
        status = self._run(
            out.data_ptr(), qkv.data_ptr(), space.data_ptr(), self._table, table, len(self.weights), cos.data_ptr(),
            cos.stride(0), sin.data_ptr(), sin.stride(0), cos.shape[1], tokens, torch.get_num_threads(),
        )  # fmt: skip
        check_status("layers", status)
        heads = qkv.view(len(self.weights), tokens, self._width // head_dim, head_dim)
        return out, heads[:, :, -kv_heads:]


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _matrix(product: Product) -> _Matrix:
    w = product.weight
    return _Matrix(
        w.data.data_ptr(), _pointer(product.bias), w.outputs, w.inputs, int(w.form), w.group, w.wide, w.minima,
        product.bf16, w.offset,
    )  # fmt: skip


def _layer(layer: LayerWeights) -> _Layer:
    norms = layer._norms()
    eps = [0.0 if norm is None else norm.eps for norm in norms]
    return _Layer(
        *map(_matrix, layer.products()),
        *(None if norm is None else norm.weight.data_ptr() for norm in norms),
        _pointer(layer.sinks), layer.heads, layer.kv_heads, layer.head_dim, *eps, layer.scale, layer.softcap,
    )  # fmt: skip


def _cache(cache: LayerCacheStep) -> _Cache:
    meta, pool, tables = cache.meta, cache.pool, cache.meta.block_tables
    return _Cache(
        pool.data_ptr(), pool.shape[1], pool.shape[3], cache.window, meta.query_starts.data_ptr(),
        meta.seq_lens.data_ptr(), tables.data_ptr(), tables.stride(0), tables.shape[1], tables.shape[0],
        meta.slots.data_ptr(),
    )  # fmt: skip
