"""Sampling a token per row: the definition that every backend follows bit for bit, in plain torch.

A row's token is the argmax of ``logits / temperature + noise`` over the tokens that its options keep, the first of
equal ones. Each option keeps the tokens above a threshold, equal ones included:

1. min_p: logits from ``peak + temperature * log(min_p)`` on; top_k: logits from the k-th largest on.
2. top_p, of what these keep: a token is kept if the mass strictly above it is less than top_p of the whole.

Masses are sums of integers, ``floor(2**40 * 2**((logit - peak) * log2(e) / temperature))``, so that they depend neither
on an order nor on a batch; the power is a polynomial in separately rounded float32 operations, as the noise is.
"""

import torch
from torch import Tensor

from headrace_kernels.meta import DrawOptions
from headrace_kernels.reference.noise import absorb, gumbel_noise

LOG2E = 1.4426950408889634
POWER = (0.009570100344717503, 0.05591785907745361, 0.240247443318367, 0.6931217908859253, 0.9999992847442627)
_SMALLEST = -64.0  # powers of two below 2**-41 have no mass


def draw(logits: Tensor, rows: Tensor, positions: Tensor, options: DrawOptions) -> tuple[Tensor, Tensor]:
    scores = logits.float()
    temperature, top_p, log_min_p = options.numbers[rows].T[:, :, None]  # [R, 1] each
    keys, top_k = options.integers[rows].unbind(1)
    peaks = scores.amax(-1)
    kept = scores >= _threshold(scores, peaks[:, None], temperature, top_k[:, None], top_p, log_min_p)
    noisy = scores / temperature + gumbel_noise(absorb(keys, positions), scores.shape[1])
    drawn = torch.where(kept, noisy, float("-inf")).argmax(-1)
    return torch.where(temperature[:, 0] > 0.0, drawn, scores.argmax(-1)), peaks


def _threshold(
    scores: Tensor, peak: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor
) -> Tensor:
    """The smallest logit [R, 1] that a row keeps."""
    ordered = scores.sort(-1, descending=True).values
    least = torch.where(log_min_p > float("-inf"), peak + temperature * log_min_p, float("-inf"))
    kth = ordered.gather(1, (top_k - 1).clamp(0, scores.shape[1] - 1))
    least = torch.where(top_k > 0, torch.maximum(least, kth), least)
    weights = torch.where(ordered >= least, _weights(ordered, peak, LOG2E / temperature), 0)
    mass = weights.cumsum(-1)
    within = (ordered >= least) & ((mass - weights).double() < top_p.double() * mass[:, -1:].double())
    smallest = ordered.gather(1, within.sum(-1, keepdim=True).clamp(min=1) - 1)
    return torch.where(top_p < 1.0, smallest, least)


def _weights(scores: Tensor, peak: Tensor, scale: Tensor) -> Tensor:
    """Integers [R, V] in proportion to the probabilities: 2**40 for the peak."""
    power = ((scores - peak) * scale).clamp(min=_SMALLEST)
    whole = power.round()
    rest = power - whole
    series = torch.full_like(rest, POWER[0])
    for term in POWER[1:]:
        series = series * rest + term
    return (series * ((whole.int() + (40 + 127)) << 23).view(torch.float32)).long()
