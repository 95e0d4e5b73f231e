"""Helpers of the launchers of several ops."""

import torch
from torch import Tensor

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})


def power_of_2(n: int) -> int:
    """The smallest power of two >= n: the possible sizes of Triton's tiles."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def rows(x: Tensor) -> Tensor:
    """x with contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def flat(x: Tensor) -> Tensor:
    """x as [rows, N] with contiguous rows: a view if the strides allow it."""
    return rows(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))


def quantization(pool: Tensor) -> int:
    """The kernels' code for a pool's format: 0 floating point, 1 int8, 2 e4m3 (passed as bytes)."""
    return {torch.int8: 1, torch.float8_e4m3fn: 2}.get(pool.dtype, 0)


def halves(pool: Tensor, kv_scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """keys, values [B, K, P, D] and their scales [B, K, P]; without scales the pool is passed instead, unread."""
    if pool.dtype is torch.float8_e4m3fn:
        pool = pool.view(torch.uint8)
    keys, values = pool[0], pool[1]
    return (keys, values, keys, values) if kv_scale is None else (keys, values, kv_scale[0], kv_scale[1])


def scale_strides(kv_scale: Tensor | None) -> tuple[int, int]:
    """From one block to the next, and from one head to the next."""
    return (0, 0) if kv_scale is None else (kv_scale.stride(1), kv_scale.stride(2))
