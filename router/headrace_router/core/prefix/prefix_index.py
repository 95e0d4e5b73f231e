"""Which replicas hold which KV blocks, or will, and how much of a prompt each of them has.

A replica has a slot, from `open` until `close`. The blocks of a closed slot are forgotten at once, and their memory is
used again as `sweep` finds them, a part of the table at a time; only then is the slot given to another replica.

A slot has two bits in the sets of the table: the replica holds the block; it will hold the block, since it computes a
prompt that was just sent to it.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace_router.core.prefix.digest_table import NOWHERE, Digests, DigestTable, Places, Values
from headrace_router.core.prefix.holder_sets import NO_HOLDER, HolderSets, members
from headrace_router.core.prefix.reuse_share import ReuseShare

FIRST_LOOKUP = 64  # blocks of a prompt; four times as many follow, as long as none is missing
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
        self.reuse = ReuseShare()
        # The last prompt, and the result of `_runs`, until the table changes.
        self._looked_up: tuple[Digests, int, Sequence[tuple[int, int]]] | None = None
        self._free_slots: list[int] = []
        self._slots = 0
        self._firsts = 0  # the first bit of every slot
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
            self._firsts |= 1 << 2 * slot
        self._open |= 3 << 2 * slot
        return slot

    def close(self, slot: int) -> None:
        """Forgets all blocks of a slot."""
        bits = 3 << 2 * slot
        self._open &= ~bits
        self._closing |= bits

    def closing(self, slot: int) -> bool:
        """Whether a closed slot still has blocks to sweep."""
        return bool(self._closing >> 2 * slot & 3)

    def store(self, slot: int, digests: Digests, *, expected: bool = False) -> int:
        """The replica holds these distinct blocks, or is expected to. Returns how many it did not have.

        Raises TableFullError, when some of them are not stored.
        """
        bit = 2 * slot + expected
        self._looked_up = None
        places = self._table.find(digests)
        known = places != NOWHERE
        held = places[known]
        before = self._table.values(held)
        codes = self._sets.changed(before, bit, holds=True)
        self._table.replace(held, codes)
        new = digests[~known]
        self._table.insert(new, np.full(len(new), bit, np.int32))
        return int((codes != before).sum()) + len(new)

    def remove(self, slot: int, digests: Digests, *, expected: bool = False) -> int:
        """The replica does not hold these blocks any more, or is not expected to. Returns how many it had."""
        places = self._table.find(digests)
        places = places[places != NOWHERE]
        before = self._table.values(places)
        codes = self._sets.changed(before, 2 * slot + expected, holds=False)
        self._store(places, before, codes)
        return int((codes != before).sum())

    def match(self, digests: Digests, *, held: bool = False) -> Lengths:
        """By slot: how many leading blocks of a prompt each replica has, [slots]. held: without those it will have."""
        lengths = np.zeros(self._slots, np.int64)
        if not len(digests) or not self._open:
            return lengths
        count, runs = self._runs(digests)
        bits = self._held_bits if held else self._first_bits
        having = bits(self._open)
        for start, code in runs:
            mask = bits(self._sets.mask(code))
            ended = having & ~mask
            if ended:
                if start:
                    lengths[members(ended) // 2] = start
                having &= mask
                if not having:
                    return lengths
        lengths[members(having) // 2] = count
        return lengths

    def holders(self, digests: Digests, slots: Lengths, *, held: bool = False) -> NDArray[np.bool_]:
        """Whether each of these slots' replicas has each of these blocks, [blocks, slots]."""
        bits = self._held_bits if held else self._first_bits
        places = self._table.find(digests)
        known = places != NOWHERE
        found, inverse = np.unique(self._table.values(places[known]), return_inverse=True)
        sets = np.zeros((len(found), self._slots), np.bool_)
        for row, code in zip(sets, found.tolist(), strict=True):
            row[members(bits(self._sets.mask(code) & self._open)) // 2] = True
        result = np.zeros((len(digests), len(slots)), np.bool_)
        result[known] = sets[:, slots][inverse]
        return result

    def sweep(self, segments: int) -> None:
        """Removes blocks of closed slots from that many segments of the table."""
        if not self._sweeping:
            self._sweeping, self._swept = self._closing, 0
            if not self._sweeping:
                return
        stop = min(self._swept + segments, self._table.segments)
        for segment in range(self._swept, stop):
            places, codes = self._table.filled(segment)
            self._store(places, codes, self._sets.without(codes, self._sweeping))
        self._swept = stop
        if self._swept == self._table.segments:
            self._free_slots += (members(self._first_bits(self._sweeping)) // 2).tolist()
            self._closing &= ~self._sweeping
            self._sweeping = 0

    def _first_bits(self, mask: int) -> int:
        """The first bit of every slot with either bit."""
        return (mask | mask >> 1) & self._firsts

    def _held_bits(self, mask: int) -> int:
        """The bit of every slot whose replica holds it already."""
        return mask & self._firsts

    def _runs(self, digests: Digests) -> tuple[int, Sequence[tuple[int, int]]]:
        """Of a prompt's leading blocks that the table has: how many; where each run with one code starts, and the code.

        A prompt is looked up several times for one decision.
        """
        known = self._looked_up
        if known is None or known[0] is not digests:
            codes = self._leading_codes(digests)
            starts = np.flatnonzero(np.diff(codes, prepend=codes[:1] + 1))
            runs = list(zip(starts.tolist(), codes[starts].tolist(), strict=True))
            known = self._looked_up = digests, len(codes), runs
        return known[1:]

    def _leading_codes(self, digests: Digests) -> Values:
        """Until a block is missing: of a new prompt that is soon."""
        parts, start, count = [], 0, FIRST_LOOKUP
        while start < len(digests):
            places = self._table.find(digests[start : start + count])
            missing = places == NOWHERE
            found = int(missing.argmax()) if missing.any() else len(places)
            parts.append(self._table.values(places[:found]))
            if found < len(places):
                break
            start, count = start + count, 4 * count
        return np.concatenate(parts)

    def _store(self, places: Places, before: Values, codes: Values) -> None:
        self._looked_up = None
        empty = codes == NO_HOLDER
        changed = ~empty & (codes != before)
        self._table.replace(places[changed], codes[changed])
        self._table.remove(places[empty])


def digests_of(hashes: Sequence[bytes]) -> Digests:
    """Block hashes of 16 bytes as the index has them."""
    first = np.frombuffer(b"".join(hashes), np.uint64).reshape(len(hashes), HASH_BYTES // 8)[:, 0].copy()
    first[first == 0] = 1
    return first
