"""Masks of allowed tokens (constraints, ``allowed_token_ids``): bits from the host, applied to logits on the device."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from headrace_worker.core.guide import Mask
from headrace_worker.core.plan import RowInit
from headrace_worker.sampler.batch import SampleBatch

NO_MASKS: Mapping[int, Mask] = MappingProxyType({})

_BITS = torch.tensor([[byte >> bit & 1 for bit in range(8)] for byte in range(256)], dtype=torch.bool)


class MaskState:
    """Per row the mask of its ``allowed_token_ids``; constraints come with each step.

    Holds the bits of every byte on the device: a lookup takes one byte per token, shifts would take words.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._bits = _BITS.to(device)  # [256, 8]
        self.rows: dict[int, Mask] = {}

    def init(self, init: RowInit) -> None:
        """Store a row's options; ids outside the vocabulary cannot be sampled and are left out."""
        if init.sampling.allowed_token_ids:
            bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
            bits[[token for token in init.sampling.allowed_token_ids if token < self._vocab_size]] = 1
            self.rows[init.row] = np.packbits(bits, bitorder="little").view("<i4")

    def free(self, row: int) -> None:
        """Remove a row's options."""
        self.rows.pop(row, None)

    def apply(self, batch: SampleBatch, masks: Mapping[int, Mask]) -> bool:
        """Set tokens that the masks [W] int32 (by index into the batch), or the rows' own, exclude to -inf; True if
        there are masks.
        """
        if own := {i: self.rows[batch.rows[i]] for i in batch.users(self.rows)}:
            both = {i: masks[i][: len(own[i])] & own[i][: len(masks[i])] for i in own if i in masks}
            masks = {**masks, **own, **both}
        if not masks:
            return False
        users = sorted(masks)
        allowed = self._allowed(batch, [masks[i] for i in users])
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
