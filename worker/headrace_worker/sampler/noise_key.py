"""Keys of the sampling noise: a 64-bit mix of (seed, choice index, purpose, absolute position).

``state = 0``, then each of the four words in that order is absorbed, as in ``headrace_kernels.reference.noise``, which
turns a key into noise. The position is absorbed where the token is drawn.
The definition must not change: a seed has the same result on all replicas, after restarts and in later versions.
"""

import torch

from headrace_kernels.reference.noise import absorb

PURPOSE_TOKEN = 1  # sampling a token; other uses at the same position (e.g. speculation) take other numbers


def row_key(seed: int, choice_index: int, purpose: int = PURPOSE_TOKEN) -> int:
    """The part of a key that a row keeps, as a signed 64-bit integer. seed: any 64-bit integer."""
    state = torch.zeros((), dtype=torch.int64)
    for word in (seed, choice_index, purpose):
        state = absorb(state, torch.tensor(_signed(word), dtype=torch.int64))
    return int(state)


def _signed(word: int) -> int:
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >= 1 << 63 else word
