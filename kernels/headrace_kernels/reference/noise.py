"""Counter-based Gumbel noise: the same bits on every device and in every batch.

All of it is a pure function of a 64-bit key and a vocabulary index:

1. ``hash = finalize(key + GOLDEN * (index + 1))``: SplitMix64 (Steele, Lea, Flood 2014) at step ``index``;
2. its upper 32 bits k give ``x = (k + 0.5) / 2**32``, rounded to float32 (small x keep 24 significant bits);
3. ``E = -log(1 - x)`` is exponential, ``-log(E)`` is Gumbel. Small x decide an argmax, and there E is as
   precise as x, because log(1 - x) is computed from x itself. The range is finite: from -2.82 to 22.9.

The logarithm is written out in float32 multiplications, additions and divisions, each rounded on its own (no fused
multiply-add), so that IEEE arithmetic alone fixes the bits: libraries' logarithms differ between devices.
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_LARGEST_X = 1.0 - 2.0**-24
_NEAR_ONE = 0.25  # below this x, 1 - x needs no range reduction
_LN2 = 0.6931471805599453
_SPLIT = 0.70703125  # about 1/sqrt 2, exact in float32


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned word: torch has no 64-bit unsigned arithmetic."""
    return word - (1 << 64) if word >= 1 << 63 else word


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def finalize(x: Tensor) -> Tensor:
    """SplitMix64's output function on int64 (modulo 2**64): a bijection that mixes all bits."""
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def absorb(state: Tensor, word: Tensor) -> Tensor:
    """Mix one more word into the state of a key; both int64, any shape."""
    return finalize((state ^ word) + _signed(GOLDEN))


def gumbel_noise(keys: Tensor, vocab: int) -> Tensor:
    """Noise [R, V] float32 of keys [R] int64."""
    return gumbel_noise_at(keys, torch.arange(vocab, device=keys.device).expand(len(keys), vocab))


def gumbel_noise_at(keys: Tensor, ids: Tensor) -> Tensor:
    """Noise [R, N] float32 of keys [R] int64 at vocabulary indices ids [R, N] int64."""
    hashed = finalize(keys[:, None] + (ids.long() + 1) * _signed(GOLDEN))
    x = (_shift_right(hashed, 32).float() + 0.5) * 2.0**-32
    x = x.clamp(max=_LARGEST_X)
    near = x < _NEAR_ONE
    mantissa, exponent = _split(1.0 - x)
    exponential = -_log(torch.where(near, -x, mantissa), exponent.masked_fill(near, 0.0))
    return -_log(*_split(exponential))


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """(f, e) with x = (1 + f) * 2**e and 1 + f in [0.707, 1.414), for positive normal x."""
    mantissa, exponent = torch.frexp(x)  # mantissa in [0.5, 1)
    low = mantissa < _SPLIT
    mantissa = torch.where(low, mantissa * 2.0, mantissa)
    return mantissa - 1.0, (exponent - low.to(exponent.dtype)).float()


def _log(f: Tensor, exponent: Tensor) -> Tensor:
    """log((1 + f) * 2**exponent) by the series of the inverse hyperbolic tangent; |f| below 0.42."""
    s = f / (f + 2.0)
    z = s * s
    series = z * (1.0 / 9.0)
    for term in (1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0):
        series = z * (series + term)
    twice = s + s
    return exponent * _LN2 + (twice + twice * series)
