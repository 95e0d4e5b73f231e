"""The public ops. Each call runs on the best available backend for its tensors (``describe()`` names it).

Shape letters are explained in ``headrace_kernels.meta``. Inputs may be strided views; outputs are contiguous.
"""

import torch
from torch import Tensor

from headrace_kernels import catalog, kv_format
from headrace_kernels.arguments import KernelArgumentError
from headrace_kernels.meta import AttentionMeta, DrawOptions, HeadNorms, StateMeta
from headrace_kernels.packed import PackedWeight
from headrace_kernels.rounded import GROUP, Rounded, ScaledWeight


def write_kv(key: Tensor, value: Tensor, pool: Tensor, slots: Tensor, kv_scale: Tensor | None = None) -> None:
    """Stores key and value [T, K, D] of new tokens into one layer's pool [2, B, K, P, D] at ``slots`` [T] int64.

    Negative slots are skipped. kv_scale [2, B, K, P]: for pools of int8 and float8_e4m3fn, see
    ``headrace_kernels.kv_format``; raises CacheFormatError if the two do not match.
    """
    kv_format.check(pool, kv_scale)
    catalog.WRITE_KV.best(pool)(key, value, pool, slots, kv_scale)


def rope_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: Tensor,
    slots: Tensor,
    kv_scale: Tensor | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotary embedding, and ``write_kv`` of the rotated key, in one op: returns the rotated query [T, H, D].

    query [T, H, D], key and value [T, K, D], cos and sin [T, R], pool [2, B, K, P, D], slots [T]. The embedding is the
    half-rotation of the first R of D. With `norms`, the heads of both are normalized before. May write into query and
    key; the key must not be used afterwards.
    """
    kv_format.check(pool, kv_scale)
    return catalog.ROPE_WRITE_KV.best(pool)(query, key, value, cos, sin, pool, slots, kv_scale, norms)


def write_part(rows: Tensor, part: Tensor, slots: Tensor) -> None:
    """Stores rows [T, K, D] of new tokens into a layer's keys or values [B, K, P, D], which may be a view.

    slots [T] int64: negative ones may write to block 0.
    """
    catalog.WRITE_PART.best(part)(rows, part, slots)


def uneven_attention(
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
) -> Tensor:
    """As ``paged_attention``, with keys and values of different sizes: query [T, H, D], keys [B, K, P, D], values
    [B, K, P, E] -> [T, H, E]. Both may be views, and values those of a part of the keys.

    Raises KernelArgumentError.
    """
    return catalog.UNEVEN_ATTENTION.best(keys)(
        query, keys, values, meta, scale=scale, window=window, softcap=softcap, sinks=sinks, deterministic=deterministic
    )


def select_keys(query: Tensor, weights: Tensor, keys: Tensor, meta: AttentionMeta, count: int) -> tuple[Tensor, Tensor]:
    """The `count` keys of each token's sequence with the highest scores, of those up to the token, in their order.

    query [T, H, D], weights [T, H] float32, keys [B, 1, P, D], which may be a view. A key's score is the sum over heads
    of weight * max(0, query . key); of equal ones the earlier is taken. Returns their places, block * P + offset
    [T, count] int32, and how many each token has [T] int32: fewer than `count` if there are no more, and none for
    tokens of no sequence. Raises KernelArgumentError.
    """
    return catalog.SELECT_KEYS.best(keys)(query, weights, keys, meta, count)


def rope_angles(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R] of positions [T] int64 times frequencies [R / 2] float32, the same in both halves, times
    ``factor``, in ``dtype``: what ``rope_write_kv`` rotates with.
    """
    return catalog.ROPE_ANGLES.best(positions)(positions, frequencies, factor, dtype)


def paged_attention(
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
) -> Tensor:
    """Causal attention of query [T, H, D] over one layer's pool [2, B, K, P, D] -> [T, H, D].

    H is a multiple of K; query head h reads KV head h // (H / K). The new tokens must already be in the pool.
    window: keys a query attends to, itself included (0 = all). softcap: scores become ``softcap * tanh(scores /
    softcap)`` (0 = off). sinks: [H] logits that take part in each softmax without a value. kv_scale: see ``write_kv``.
    deterministic: a row's result depends on its own query and keys alone, bit for bit, not on its batch, nor on whether
    it is a decode step or part of a prefill. Tokens of no sequence, or of one of length 0, give zeros.
    """
    kv_format.check(pool, kv_scale)
    return catalog.PAGED_ATTENTION.best(query)(
        query, pool, meta, scale=scale, window=window, softcap=softcap, sinks=sinks, kv_scale=kv_scale,
        deterministic=deterministic,
    )  # fmt: skip


def causal_conv(
    x: Tensor, weight: Tensor, pool: Tensor, meta: StateMeta, bias: Tensor | None = None, silu: bool = False
) -> Tensor:
    """Convolution of x [T, C] with the taps weight [C, W], per channel and sequence -> [T, C].

    pool [N, W - 1, C]: the last inputs of each slot. silu: of the result.
    """
    return catalog.CAUSAL_CONV.best(x)(x, weight, pool, meta, bias, silu)


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, pool: Tensor, meta: StateMeta
) -> Tensor:
    """Gated delta rule (Yang et al. 2024, arXiv:2412.06464) over the states in pool [N, H, D, E] float32.

    query, key [T, K, D], value [T, H, E], beta [T, H]; decay: natural logarithm [T, H], or [T, H, D] per channel
    (Kimi Delta Attention) -> [T, H, E] float32. H is a multiple of K; head h reads query and key h // (H / K), which
    are divided by their norms.
    """
    return catalog.DELTA_RULE.best(value)(query, key, value, decay, beta, pool, meta)


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
    """Structured state space duality, Mamba-2 (Dao, Gu 2024, arXiv:2405.21060), over states [N, H, E, D] float32.

    x [T, H, E], dt [T, H], decay [H], key (B) and query (C) [T, G, D], skip (D) and dt_bias [H] -> [T, H, E] float32.
    The step of a token is softplus(dt + dt_bias) within dt_limit. H is a multiple of G; head h reads key and query
    h // (H / G).
    """
    return catalog.SSD.best(x)(x, dt, decay, key, query, pool, meta, skip, dt_bias, dt_limit)


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
    """Selective state spaces, Mamba-1 (Gu, Dao 2023, arXiv:2312.00752), over the states in pool [N, C, D] float32.

    x, dt, gate (z) [T, C], decay [C, D], key (B) and query (C) [T, D], skip (D) and dt_bias [C] -> [T, C] float32,
    times silu(gate). The step of a token is softplus(dt + dt_bias).
    """
    return catalog.SELECTIVE_SCAN.best(x)(x, dt, decay, key, query, pool, meta, skip, gate, dt_bias)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int | None = None, gate_first: bool = True
) -> Tensor:
    """rms_norm(x silu(gate)), or rms_norm(x) silu(gate) unless gate_first: x, gate [..., N], weight [N] -> [..., N].

    Roots of mean squares are over groups of N, all of it by default.
    """
    return catalog.GATED_RMS_NORM.best(x)(x, gate, weight, eps, group, gate_first)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N] divided by its root mean square over N, times weight [N]."""
    return catalog.RMS_NORM.best(x)(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both new tensors [..., N]."""
    return catalog.ADD_RMS_NORM.best(x)(x, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of merged [..., 2 I] -> [..., I]."""
    return catalog.SILU_MUL.best(gate_up)(gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up of merged [..., 2 I] -> [..., I]; the approximation by tanh."""
    return catalog.GELU_MUL.best(gate_up)(gate_up)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) of x [..., N]. On a CPU with C++ an entry's bits do not depend on its place, as torch's do."""
    return catalog.SIGMOID.best(x)(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) of x [..., N], as ``sigmoid``."""
    return catalog.SOFTPLUS.best(x)(x)


def row_logsumexp(scores: Tensor) -> Tensor:
    """log(sum(exp(scores))) of scores [R, V] -> [R], in an order that depends on V alone; at least one is finite."""
    return catalog.ROW_LOGSUMEXP.best(scores)(scores)


def packed_matmul(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, bf16: bool = False) -> Tensor:
    """``x @ weight.T + bias``: x [..., in] float32, bias [out] or None -> [..., out].

    bf16: x is rounded to bfloat16 first, unless the weight is in float32; sums stay in float32. On a CPU with C++ a
    row's bits do not depend on the number of rows and of threads.
    """
    if x.shape[-1] != weight.inputs or (bias is not None and bias.shape != (weight.outputs,)):
        raise KernelArgumentError(
            f"packed_matmul: x {list(x.shape)} and the bias do not fit a weight of {weight.outputs} x {weight.inputs}"
        )
    if bf16 and weight.inputs % 8:
        raise KernelArgumentError(f"packed_matmul: bf16 needs a multiple of 8 inputs, not {weight.inputs}")
    return catalog.PACKED_MATMUL.best(x)(x, weight, bias, bf16)


def packed_rows(weight: PackedWeight, index: Tensor) -> Tensor:
    """The rows of the weight with these numbers, such as embeddings: index [...] int64 -> [..., in] float32."""
    return catalog.PACKED_ROWS.best(weight.data)(weight, index)


def round_rows(x: Tensor, groups: bool) -> Rounded:
    """x [..., N] rounded to e4m3, with a scale for each 128 of N, or for all of it. Raises KernelArgumentError."""
    _check_groups("round_rows", x.shape[-1], groups)
    return catalog.ROUND_ROWS.best(x)(x, groups)


def rounded_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, groups: bool
) -> tuple[Rounded, Tensor]:
    """(round_rows(rms_norm(x + residual)), x + residual); without a residual it is zero. Raises KernelArgumentError."""
    _check_groups("rounded_rms_norm", x.shape[-1], groups)
    return catalog.ROUNDED_RMS_NORM.best(x)(x, residual, weight, eps, groups)


def rounded_silu_mul(gate_up: Tensor, groups: bool) -> Rounded:
    """round_rows(silu_mul(gate_up)). Raises KernelArgumentError."""
    _check_groups("rounded_silu_mul", gate_up.shape[-1] // 2, groups)
    return catalog.ROUNDED_SILU_MUL.best(gate_up)(gate_up, groups)


def scaled_matmul(x: Rounded, weight: ScaledWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``x @ weight.T + bias`` of rounded rows [..., in], bias [out] or None -> [..., out] in ``dtype``; sums are in
    float32. On GPUs of compute capability 8.9 and more; weights in blocks on 9.0 alone.
    """
    return catalog.SCALED_MATMUL.best(x.codes)(x, weight, bias, dtype)


def _check_groups(name: str, size: int, groups: bool) -> None:
    if groups and size % GROUP:
        raise KernelArgumentError(f"{name}: rows of {size} entries are no whole groups of {GROUP}")


def draw(logits: Tensor, rows: Tensor, positions: Tensor, options: DrawOptions) -> tuple[Tensor, Tensor]:
    """(tokens [R] int64, largest logits [R] float32): a token per row of logits [R, V], by the options of ``rows`` [R].

    rows, positions: int64; positions are those of the tokens, and select their noise. Where the largest logit is not
    finite, the row has NaN or inf, or only -inf, and its token is any. The same logits give the same tokens on any
    device and in any batch. -inf is never chosen beside others. Raises KernelArgumentError for shapes that do not fit.
    """
    return catalog.DRAW.best(logits)(logits, rows, positions, options)
