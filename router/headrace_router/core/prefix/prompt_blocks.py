"""The KV blocks of a prompt, and how many of its tokens each replica would find in its cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headrace_router.core.prefix.digest_table import Digests
from headrace_router.core.prefix.prefix_index import Lengths, PrefixIndex

MAX_EXPECTED = 2048  # blocks of one prompt that an attempt is expected to leave; of a longer one its beginning
MAX_COVERED = 1 << 19  # blocks x replicas of a group with a window: some milliseconds


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """A prompt's full blocks in one cache group."""

    window: int  # tokens that a query sees, itself included; 0 = all
    digests: Digests


@dataclass(frozen=True)
class PromptBlocks:
    """A prompt's full blocks in every cache group, the same number in each."""

    block_size: int  # tokens
    groups: Sequence[GroupBlocks]

    @cached_property
    def digests(self) -> Digests:
        """Of all groups."""
        return np.concatenate([group.digests for group in self.groups])

    @cached_property
    def expected(self) -> Digests:
        """Distinct ones that a replica which computes the prompt will have: the same array for all attempts."""
        most = MAX_EXPECTED // len(self.groups)
        return np.unique(np.concatenate([group.digests[:most] for group in self.groups]))

    def cached_tokens(self, index: PrefixIndex, tokens: int, *, held: bool = False) -> Lengths:
        """By slot: of at most that many leading tokens, how many need no computation there, [slots].

        held: without those that the replicas are only expected to have soon.

        The rule of the replicas: every block before, and with a window those that the next query sees.
        """
        most = np.full(index.slots, tokens // self.block_size, np.int64)
        for group in self.groups:
            if not group.window:
                most = np.minimum(most, index.match(group.digests, held=held))
        windowed = [group for group in self.groups if group.window]
        if windowed and most.any():
            count = int(most.max())
            slots, few = np.flatnonzero(most), max(1, MAX_COVERED // count)
            if len(slots) > few:  # the others count as without the prompt: some of those with most of it suffice
                slots = slots[np.argpartition(-most[slots], few - 1)[:few]]
            covered = np.ones((count + 1, len(slots)), np.bool_)
            for group in windowed:
                covered &= self._covered(index.holders(group.digests[:count], slots, held=held), group.window)
            covered &= np.arange(count + 1)[:, None] <= most[slots]
            most[:] = 0
            most[slots] = count - covered[::-1].argmax(axis=0)  # a prefix of no blocks is covered
        return most * self.block_size

    def _covered(self, holders: NDArray[np.bool_], window: int) -> NDArray[np.bool_]:
        """[blocks + 1, replicas]: whether all blocks that the query after so many blocks sees are there."""
        count, replicas = holders.shape
        missing = np.zeros((count + 1, replicas), np.int32)
        np.cumsum(~holders, axis=0, out=missing[1:])
        blocks = np.arange(count + 1)
        passed = np.maximum(0, blocks * self.block_size - window + 1) // self.block_size
        seen: NDArray[np.bool_] = missing == missing[passed]
        return seen
