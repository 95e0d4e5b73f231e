"""Adjacent decoder layers in one C++ call: float32 on a CPU, with packed weights.

Shape letters: T tokens, N hidden size, H query heads, K key/value heads, D head size, M inputs of the last product.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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
class Branch:
    """What is done with the result of attention or MLP before it is added: a norm, and a factor."""

    norm: Norm | None = None
    factor: float = 1.0


@dataclass(frozen=True)
class LayerWeights:
    """x + attention(norm(x)), then x + down(act(gate) * up), gate and up being the halves of a product of norm(x)."""

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
    attention: Branch = Branch()
    mlp: Branch = Branch()
    gelu: bool = False  # by the tangent; else SiLU

    def fits(self) -> bool:
        """Whether the C++ code is written for it."""
        group = self.heads // self.kv_heads
        branches = [branch.norm for branch in self.branches()]
        norms = [norm.weight for norm in (*self._norms(), *branches) if norm is not None]
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

    def branches(self) -> tuple[Branch, Branch]:
        """In the order of the layer."""
        return self.attention, self.mlp


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
        ("centre", _D),
    ]


class _Branch(ctypes.Structure):
    _fields_ = [("norm", _P), ("eps", _D), ("factor", _D)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _Branch) for name in ("attention", "mlp")),
        *((name, _P) for name in ("first_norm", "second_norm", "query_norm", "key_norm", "sinks")),
        *((name, _I) for name in ("heads", "kv_heads", "head_dim", "activation")),
        *((name, _D) for name in ("first_eps", "second_eps", "query_eps", "key_eps", "scale", "softcap")),
    ]


class _Cache(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("keys", "values")),
        *((name, _I) for name in ("pool_blocks", "block_stride", "block_size", "window")),
        *((name, _P) for name in ("query_starts", "seq_lens", "tables")),
        *((name, _I) for name in ("table_stride", "table_entries", "sequences")),
        ("slots", _P),
    ]


@dataclass(frozen=True)
class LayerPool:
    """Where one layer keeps keys and values."""

    pool: Tensor  # [2, B, K, P, D], each block's [K, P, D] contiguous
    window: int  # keys that a query attends to; 0 = all
    group: int  # which meta of a step describes its blocks


class Layers:
    """Layers of one shape, whose hidden states never leave C++ between them. Raises KernelBuildError.

    `bind` comes before the first call. Not for several threads at a time.
    """

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        self.weights = tuple(layers)
        library = load()
        assert library.headrace_layer_bytes() == ctypes.sizeof(_Layer) + ctypes.sizeof(_Cache)
        self._run = library.headrace_layers
        first = self.weights[0]
        self._inputs, self._width = first.qkv.weight.inputs, first.qkv.weight.outputs
        self._space = 2 * first.qkv.weight.inputs + first.out.weight.inputs + 3 * first.down.weight.inputs
        self._kv_heads, self._head_dim = first.kv_heads, first.head_dim
        self._table = (_Layer * len(self.weights))(*map(_layer, self.weights))
        # Every field of it has eight bytes: those of the layer's pool and window, then seven of the step's meta.
        self._caches = np.zeros((len(self.weights), ctypes.sizeof(_Cache) // 8), np.int64)
        self._caches_at = self._caches.ctypes.data
        self._groups: dict[int, list[int]] = {}

    def bind(self, pools: Sequence[LayerPool]) -> None:
        """Which pool each layer has from now on; the caller keeps them. Raises KernelArgumentError."""
        self._groups = {}
        for i, layer in enumerate(pools):
            pool = layer.pool
            plain = pool.dtype is torch.float32 and pool.is_cpu and pool[0, 0].is_contiguous()
            if not plain or (pool.shape[2], pool.shape[4]) != (self._kv_heads, self._head_dim):
                raise KernelArgumentError(
                    f"layers: a pool {list(pool.shape)} of {pool.dtype} is not for {self._kv_heads} KV heads of size "
                    f"{self._head_dim} in float32. This is a bug: please report it."
                )
            places = pool[0].data_ptr(), pool[1].data_ptr(), pool.shape[1], pool.stride(1), pool.shape[3], layer.window
            self._caches[i, : len(places)] = places
            self._groups.setdefault(layer.group, []).append(i)

    def __call__(
        self, hidden: Tensor, metas: Sequence[AttentionMeta], cos: Tensor, sin: Tensor, only: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """hidden [1, T, N], cos and sin [T, R] -> the last layer's hidden states, and all values [layers, T, K, D].

        only: one layer, in place of all. Keys and values are written to the pools. Raises KernelArgumentError for
        tensors of other kinds.
        """
        tokens, inputs = hidden.shape[1:]
        plain = (x.dtype is torch.float32 and x.is_cpu and x.stride(-1) == 1 for x in (hidden, cos, sin))
        if inputs != self._inputs or not len(cos) == len(sin) == tokens or cos.shape[1] > self._head_dim:
            raise KernelArgumentError(
                f"layers: hidden {list(hidden.shape)}, cos {list(cos.shape)} and sin {list(sin.shape)} do not fit to "
                f"{self._inputs} inputs and heads of size {self._head_dim}. This is a bug: please report it."
            )
        if not all(plain):
            raise KernelArgumentError("layers: the step is not in float32 on a CPU. This is a bug: please report it.")
        for group, rows in self._groups.items():
            self._caches[rows, 6:] = _step(metas[group], tokens)
        start, count = (0, len(self.weights)) if only is None else (only, 1)
        out = hidden.clone(memory_format=torch.contiguous_format)
        qkv = torch.empty(count, tokens, self._width)
        space = torch.empty(tokens * self._space)
        status = self._run(
            out.data_ptr(), qkv.data_ptr(), space.data_ptr(), ctypes.byref(self._table, start * ctypes.sizeof(_Layer)),
            self._caches_at + start * ctypes.sizeof(_Cache), count, cos.data_ptr(), cos.stride(0),
            sin.data_ptr(), sin.stride(0), cos.shape[1], tokens, torch.get_num_threads(),
        )  # fmt: skip
        check_status("layers", status)
        heads = qkv.view(count, tokens, self._width // self._head_dim, self._head_dim)
        return out, heads[:, :, -self._kv_heads :]


def _step(meta: AttentionMeta, tokens: int) -> tuple[int, ...]:
    """What a step has for the layers of one group: the last fields of `_Cache`."""
    starts, lens, tables, slots = meta.query_starts, meta.seq_lens, meta.block_tables, meta.slots
    if len(slots) != tokens:
        raise KernelArgumentError(
            f"layers: {tokens} tokens, but the cache has {len(slots)} slots. This is a bug: please report it."
        )
    whole = all(part.is_contiguous() and part.is_cpu for part in (starts, lens, slots)) and tables.stride(1) == 1
    if not whole or slots.dtype is not torch.int64 or {starts.dtype, lens.dtype, tables.dtype} != {torch.int32}:
        raise KernelArgumentError("layers: the step's lengths are not as described. This is a bug: please report it.")
    return (
        starts.data_ptr(), lens.data_ptr(), tables.data_ptr(), tables.stride(0), tables.shape[1], tables.shape[0],
        slots.data_ptr(),
    )  # fmt: skip


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _matrix(product: Product) -> _Matrix:
    w = product.weight
    return _Matrix(
        w.data.data_ptr(), _pointer(product.bias), w.outputs, w.inputs, int(w.form), w.group, w.wide, w.minima,
        product.bf16, w.offset, w.centre,
    )  # fmt: skip


def _branch(branch: Branch) -> _Branch:
    norm = branch.norm
    return _Branch(None if norm is None else norm.weight.data_ptr(), 0.0 if norm is None else norm.eps, branch.factor)


def _layer(layer: LayerWeights) -> _Layer:
    norms = layer._norms()
    eps = [0.0 if norm is None else norm.eps for norm in norms]
    return _Layer(
        *map(_matrix, layer.products()), *map(_branch, layer.branches()),
        *(None if norm is None else norm.weight.data_ptr() for norm in norms),
        _pointer(layer.sinks), layer.heads, layer.kv_heads, layer.head_dim, layer.gelu, *eps, layer.scale,
        layer.softcap,
    )  # fmt: skip
