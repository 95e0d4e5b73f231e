"""Formats of the KV pool: floating point, or 8 bits with one scale per written token and KV head.

A quantized pool [2, B, K, P, D] has ``kv_scale`` [2, B, K, P] float32: the largest magnitude of a head's D entries
divided by the format's largest number. It is computed when the token is written, so no calibration is needed, blocks
can be moved and shared together with their scales, and no other token affects its precision. Entry = stored number *
scale. In the memory of a block the scales [P] of a head follow its entries [P, D].
"""

import torch
from torch import Tensor

FORMATS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # by their names in settings
SCALE_BYTES = 4  # bytes of the scale for a head's entries of a token
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST_SCALE = 1e-30  # keeps the entries of an all-zero head finite


class CacheFormatError(ValueError):
    """A KV pool's dtype and scales do not match."""


def split(memory: Tensor, heads: int, block_size: int, name: str) -> tuple[Tensor, Tensor]:
    """The entries [..., K, P, D] and scales [..., K, P] in the memory [..., K * P * (D + 4)] uint8 of blocks."""
    by_head = memory.view(*memory.shape[:-1], heads, -1)
    size = by_head.shape[-1] - block_size * SCALE_BYTES
    entries = by_head[..., :size].view(*by_head.shape[:-1], block_size, -1)
    return entries.view(FORMATS[name]), by_head[..., size:].view(torch.float32)


def check(pool: Tensor, kv_scale: Tensor | None) -> None:
    """Raises CacheFormatError unless the pool is plain without scales, or quantized with scales that fit it."""
    if pool.dtype not in LARGEST:
        if kv_scale is not None:
            raise CacheFormatError(f"A KV pool of {pool.dtype} takes no kv_scale; pools of int8 and float8_e4m3fn do.")
        return
    if kv_scale is None:
        raise CacheFormatError(f"A KV pool of {pool.dtype} needs kv_scale, a float32 tensor {list(pool.shape[:4])}.")
    fits = kv_scale.shape == pool.shape[:4] and kv_scale.stride(3) == 1
    if not fits or kv_scale.dtype is not torch.float32:
        raise CacheFormatError(
            f"A KV pool {list(pool.shape)} requires kv_scale as float32 {list(pool.shape[:4])} with contiguous [P], "
            f"not {kv_scale.dtype} {list(kv_scale.shape)} with strides {list(kv_scale.stride())}."
        )
