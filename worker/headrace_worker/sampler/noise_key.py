"""Keys of the sampling noise: a 64-bit mix of (seed, choice index, purpose, absolute position).

``state = 0``, then for each of the four words in that order ``state = finalize((state ^ word) + GOLDEN)``, where
``finalize`` and ``GOLDEN`` are SplitMix64's, as in ``headrace_kernels.reference.noise``, which turns a key into noise.
The definition must not change: a seed has the same result on all replicas, after restarts and in later versions.
"""

import torch
from torch import Tensor

from headrace_kernels.reference.noise import GOLDEN, finalize

PURPOSE_TOKEN = 1  # sampling a token; other uses at the same position (e.g. speculation) take other numbers

_GOLDEN_SIGNED = GOLDEN - (1 << 64)


def row_key(seed: int, choice_index: int, purpose: int = PURPOSE_TOKEN) -> int:
    """The part of a key that a row keeps, as a signed 64-bit integer. seed: any 64-bit integer."""
    state = torch.zeros((), dtype=torch.int64)
    for word in (seed, choice_index, purpose):
        state = absorb(state, torch.tensor(_signed(word), dtype=torch.int64))
    return int(state)


def absorb(state: Tensor, word: Tensor) -> Tensor:
    """Mix one more word into the state; both int64, any shape."""
    return finalize((state ^ word) + _GOLDEN_SIGNED)


def _signed(word: int) -> int:
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >= 1 << 63 else word
