"""Which replicas hold which KV blocks, or will, and how much of a prompt each of them has.

A replica has a slot, from `open` until `close`. The blocks of a closed slot are forgotten at once, and their memory is
used again as `sweep` finds them, a part of the table at a time; only then is the slot given to another replica.

A slot has two bits in the sets of the table: the replica holds the block; it will hold the block, since it computes a
prompt that was just sent to it.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace_router.core.prefix.digest_table import NOWHERE, Digests, DigestTable
from headrace_router.core.prefix.holder_sets import NO_HOLDER, HolderSets, members

HASH_BYTES = 16  # of a block, as replicas report it
Lengths = NDArray[np.int64]


class PrefixIndex:
    """Blocks by the first 8 bytes of their hash.

    Two blocks with equal beginnings are taken for one: of 10 million blocks, one lookup in a million million. Only a
    decision is a little worse then, since replicas compare tokens. Blocks that do not fit are not stored.
    """

    def __init__(self, max_blocks: int) -> None:
        self._table = DigestTable(max_blocks)
        self._sets = HolderSets()
        self._free_slots: list[int] = []
        self._slots = 0
        self._open = 0  # both bits of open slots
        self._closing = 0  # both bits of closed slots whose blocks are not all removed yet
        self._swept = 0  # segments since the sweep began
        self._sweeping = 0  # the bits of this sweep

    @property
    def blocks(self) -> int:
        """Blocks that at least one replica has; those of closed slots count until they are swept."""
        return self._table.count

    @property
    def slots(self) -> int:
        """Every open slot is smaller."""
        return self._slots

    def open(self) -> int:
        """A slot without blocks."""
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot, self._slots = self._slots, self._slots + 1
        self._open |= 3 << 2 * slot
        return slot

    def close(self, slot: int) -> None:
        """Forgets all blocks of a slot."""
        bits = 3 << 2 * slot
        self._open &= ~bits
        self._closing |= bits

    def store(self, slot: int, digests: Digests, *, expected: bool = False) -> None:
        """The replica holds these distinct blocks, or is expected to. Those that are known already change nothing.

        Raises TableFullError, when some of them are not stored.
        """
        bit = 2 * slot + expected
        places = self._table.find(digests)
        known = places != NOWHERE
        held = places[known]
        self._table.replace(held, self._sets.changed(self._table.values(held), bit, holds=True))
        new = digests[~known]
        self._table.insert(new, np.full(len(new), bit, np.int32))

    def remove(self, slot: int, digests: Digests, *, expected: bool = False) -> None:
        """The replica does not hold these blocks any more, or is not expected to. Others change nothing."""
        places = self._table.find(digests)
        self._without(places[places != NOWHERE], 2 * slot + expected)

    def match(self, digests: Digests) -> Lengths:
        """By slot: how many leading blocks of a prompt each replica has, [slots]."""
        lengths = np.zeros(self._slots, np.int64)
        if not len(digests) or not self._open:
            return lengths
        places = self._table.find(digests)
        missing = places == NOWHERE
        count = int(missing.argmax()) if missing.any() else len(digests)
        codes = self._table.values(places[:count])
        starts = np.flatnonzero(np.diff(codes, prepend=codes[:1] + 1))
        having = self._first_bits(self._open)
        for start, code in zip(starts.tolist(), codes[starts].tolist(), strict=True):
            mask = self._first_bits(self._sets.mask(code))
            ended = having & ~mask
            if ended:
                if start:
                    lengths[members(ended) // 2] = start
                having &= mask
                if not having:
                    return lengths
        lengths[members(having) // 2] = count
        return lengths

    def holders(self, digests: Digests) -> NDArray[np.bool_]:
        """Whether each replica has each of these blocks, [blocks, slots]."""
        places = self._table.find(digests)
        known = places != NOWHERE
        found, inverse = np.unique(self._table.values(places[known]), return_inverse=True)
        sets = np.zeros((len(found), self._slots), np.bool_)
        for row, code in zip(sets, found.tolist(), strict=True):
            row[members(self._first_bits(self._sets.mask(code) & self._open)) // 2] = True
        result = np.zeros((len(digests), self._slots), np.bool_)
        result[known] = sets[inverse]
        return result

    def sweep(self, segments: int) -> None:
        """Removes blocks of closed slots from that many segments of the table."""
        if not self._sweeping:
            self._sweeping, self._swept = self._closing, 0
            if not self._sweeping:
                return
        stop = min(self._swept + segments, self._table.segments)
        for segment in range(self._swept, stop):
            for bit in members(self._sweeping).tolist():
                places, codes = self._table.filled(segment)
                found, inverse = np.unique(codes, return_inverse=True)
                has = np.array([bool(self._sets.mask(code) >> bit & 1) for code in found.tolist()], np.bool_)
                if has.any():
                    self._without(places[has[inverse]], bit)
        self._swept = stop
        if self._swept == self._table.segments:
            self._free_slots += (members(self._first_bits(self._sweeping)) // 2).tolist()
            self._closing &= ~self._sweeping
            self._sweeping = 0

    def _first_bits(self, mask: int) -> int:
        """The first bit of every slot with either bit."""
        every_first = ((1 << 2 * self._slots) - 1) // 3
        return (mask | mask >> 1) & every_first

    def _without(self, places: NDArray[np.int64], bit: int) -> None:
        codes = self._sets.changed(self._table.values(places), bit, holds=False)
        empty = codes == NO_HOLDER
        self._table.replace(places[~empty], codes[~empty])
        self._table.remove(places[empty])


def digests_of(hashes: Sequence[bytes]) -> Digests:
    """Block hashes of 16 bytes as the index has them."""
    first = np.frombuffer(b"".join(hashes), np.uint64).reshape(len(hashes), HASH_BYTES // 8)[:, 0].copy()
    first[first == 0] = 1
    return first
