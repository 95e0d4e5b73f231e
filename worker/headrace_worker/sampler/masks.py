"""Masks of constrained outputs: bits from the host, applied to logits on the device."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from headrace_worker.core.guide import Mask
from headrace_worker.sampler.batch import SampleBatch

NO_MASKS: Mapping[int, Mask] = MappingProxyType({})

_BITS = torch.tensor([[byte >> bit & 1 for bit in range(8)] for byte in range(256)], dtype=torch.bool)


class MaskState:
    """Holds the bits of every byte on the device: a lookup takes one byte per token, shifts would take words."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._bits = _BITS.to(device)  # [256, 8]

    def apply(self, batch: SampleBatch, masks: Mapping[int, Mask]) -> bool:
        """Set tokens that the masks [W] int32 (by index into the batch) exclude to -inf; True if there are masks."""
        if not masks:
            return False
        users = list(masks)
        allowed = self._allowed(batch, list(masks.values()))
        if len(users) == len(batch.rows) and users == list(range(len(users))):
            batch.logits.masked_fill_(~allowed, float("-inf"))
        else:
            index = batch.tensor(users, torch.int64)
            batch.logits[index] = batch.logits[index].masked_fill_(~allowed, float("-inf"))
        return True

    def _allowed(self, batch: SampleBatch, masks: list[Mask]) -> Tensor:
        """[A, V] bool; little-endian words are bytes in the order of their tokens."""
        packed = np.zeros((len(masks), -(-self._vocab_size // 32)), "<i4")
        for line, mask in zip(packed, masks, strict=True):
            known = mask[: len(line)]
            line[: len(known)] = known
        bits = self._bits[batch.tensor(packed.view(np.uint8), torch.uint8).int()]  # [A, bytes, 8]
        return bits.view(len(masks), -1)[:, : self._vocab_size]
