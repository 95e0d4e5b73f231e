"""The KV blocks of a prompt, and how many of its tokens each replica would find in its cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_router.core.prefix.digest_table import Digests
from headrace_router.core.prefix.prefix_index import Lengths, PrefixIndex


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """A prompt's full blocks in one cache group."""

    window: int  # tokens that a query sees, itself included; 0 = all
    digests: Digests


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """A prompt's full blocks in every cache group, the same number in each."""

    block_size: int  # tokens
    groups: Sequence[GroupBlocks]

    @property
    def digests(self) -> Digests:
        """Of all groups."""
        return np.concatenate([group.digests for group in self.groups])

    def cached_tokens(self, index: PrefixIndex, tokens: int) -> Lengths:
        """By slot: of at most that many leading tokens, how many need no computation there, [slots].

        The rule of the replicas: every block before, and with a window those that the next query sees.
        """
        most = np.full(index.slots, tokens // self.block_size, np.int64)
        for group in self.groups:
            if not group.window:
                most = np.minimum(most, index.match(group.digests))
        windowed = [group for group in self.groups if group.window]
        if windowed and most.any():
            count = int(most.max())
            covered = np.ones((count + 1, index.slots), np.bool_)
            for group in windowed:
                covered &= self._covered(index.holders(group.digests[:count]), group.window)
            covered &= np.arange(count + 1)[:, None] <= most
            most = count - covered[::-1].argmax(axis=0)  # a prefix of no blocks is covered
        return most * self.block_size

    def _covered(self, holders: NDArray[np.bool_], window: int) -> NDArray[np.bool_]:
        """[blocks + 1, slots]: whether all blocks that the query after so many blocks sees are there."""
        count, slots = holders.shape
        missing = np.zeros((count + 1, slots), np.int64)
        np.cumsum(~holders, axis=0, out=missing[1:])
        blocks = np.arange(count + 1)
        passed = np.maximum(0, blocks * self.block_size - window + 1) // self.block_size
        seen: NDArray[np.bool_] = missing == missing[passed]
        return seen
