"""Which replicas hold which KV blocks, or will, and how much of a prompt each of them has.

A replica has a slot, from `open` until `close`. The blocks of a closed slot are forgotten at once, and their memory is
used again as `sweep` finds them, a part of the table at a time; only then is the slot given to another replica.

A slot has two bits in the sets of the table: the replica holds the block; it will hold the block, since it computes a
prompt that was just sent to it.

A hash table from digests to small integers, in arrays: a few calls look up or store many digests.

    digest ─ leading bits ─▶ directory ─▶ segment ─ other bits ─▶ two buckets of 8 places, one of which has it

A segment that is full is split in two by one more bit (extendible hashing: Fagin, Nievergelt, Pippenger and Strong,
1979), so that no call moves more than a few segments' entries. Of its two buckets a digest is put into the emptier one
(Azar, Broder, Karlin and Upfal, Balanced Allocations, 1999), so that segments are almost full before they are split.

Sets of replicas as small integers, each set stored once: most blocks are on one replica, and the blocks of a prefix
that is on several replicas are all on the same ones.

A code of 0 or more is the set of that bit alone; a negative code is one of the stored sets, as a bit mask.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Digests: TypeAlias = NDArray[np.uint64]
Values: TypeAlias = NDArray[np.int32]
Positions: TypeAlias = NDArray[np.int64]

BUCKET_PLACES = 8
BUCKETS = 512  # buckets per segment
SEGMENT_PLACES = BUCKETS * BUCKET_PLACES
NOWHERE = -1
SPARE_BITS = 4  # bits of the directory, beyond those that uniformly distributed digests need

_LOW = np.uint64(BUCKETS - 1)
_NEXT = np.uint64(BUCKETS.bit_length() - 1)
_EMPTY = np.uint64(0)


class TableFullError(Exception):
    """The table has no place for more digests."""


class DigestTable:
    """Values of digests. A digest is 64 uniformly distributed bits, not all 0, such as the beginning of a hash.

    A place is valid until the next `insert`. The memory of `max_places` is reserved at once, and used as it is needed:
    12 bytes per place, of which at least 4 in 10 are filled once there are 10,000 digests.
    """

    def __init__(self, max_places: int) -> None:
        segments = max(2, max_places // SEGMENT_PLACES)
        self._keys: Digests = np.zeros((segments * BUCKETS, BUCKET_PLACES), np.uint64)
        self._values: Values = np.zeros((segments * BUCKETS, BUCKET_PLACES), np.int32)
        self._max_segments = segments
        self._max_bits = segments.bit_length() + SPARE_BITS
        self._bits = 1  # leading bits of a digest that choose its entry of the directory
        self._directory: NDArray[np.int64] = np.array([0, 1], np.int64)  # segments
        self._depths = [1, 1]  # leading bits that all digests of a segment share
        self.count = 0

    @property
    def segments(self) -> int:
        """In use."""
        return len(self._depths)

    def find(self, digests: Digests) -> Positions:
        """The place of each digest, NOWHERE for those that it does not have."""
        rows = self._rows(digests)
        found = (self._keys[rows] == digests[:, None, None]).reshape(len(digests), 2 * BUCKET_PLACES)
        column = found.argmax(axis=1)
        entry = np.arange(len(digests))
        places = rows[entry, column // BUCKET_PLACES] * BUCKET_PLACES + column % BUCKET_PLACES
        return np.where(found[entry, column], places, NOWHERE)

    def values(self, places: Positions) -> Values:
        """The values at places that `find` returned, none of them NOWHERE."""
        return self._values.reshape(-1)[places]

    def replace(self, places: Positions, values: Values) -> None:
        """Stores other values at such places."""
        self._values.reshape(-1)[places] = values

    def remove(self, places: Positions) -> None:
        """Forgets the digests at such places, which are distinct."""
        self._keys.reshape(-1)[places] = _EMPTY
        self.count -= len(places)

    def insert(self, digests: Digests, values: Values) -> None:
        """Stores distinct digests that it does not have. Raises TableFullError, with some of them stored."""
        while len(digests):
            rows = self._rows(digests)
            free = (self._keys[rows] == _EMPTY).sum(axis=2)
            emptier = free.argmax(axis=1)
            entry = np.arange(len(digests))
            fits = free[entry, emptier] > 0
            # One of those that go to the same bucket; the others see it filled in the next round.
            bucket, first = np.unique(rows[entry, emptier][fits], return_index=True)
            chosen = np.flatnonzero(fits)[first]
            column = (self._keys[bucket] == _EMPTY).argmax(axis=1)
            self._keys[bucket, column] = digests[chosen]
            self._values[bucket, column] = values[chosen]
            self.count += len(chosen)
            for segment in np.unique(rows[~fits, 0] // BUCKETS).tolist():
                self._split(segment)
            left = np.ones(len(digests), np.bool_)
            left[chosen] = False
            digests, values = digests[left], values[left]

    def filled(self, segment: int) -> tuple[Positions, Values]:
        """The places of a segment that have digests, and their values."""
        rows = slice(segment * BUCKETS, (segment + 1) * BUCKETS)
        inside = np.flatnonzero(self._keys[rows].reshape(-1))
        return inside + segment * SEGMENT_PLACES, self._values[rows].reshape(-1)[inside]

    def _rows(self, digests: Digests) -> Positions:
        """Both buckets of each digest: [N, 2]."""
        start = self._directory[digests >> np.uint64(64 - self._bits)] * BUCKETS
        rows = np.empty((len(digests), 2), np.int64)
        rows[:, 0] = start + (digests & _LOW).astype(np.int64)
        rows[:, 1] = start + (digests >> _NEXT & _LOW).astype(np.int64)
        return rows

    def _split(self, segment: int) -> None:
        """Moves the digests of a segment whose next bit is set to a new one, into the same buckets and columns."""
        if self.segments == self._max_segments:
            raise TableFullError
        depth = self._depths[segment]
        if depth == self._max_bits:  # its digests are not uniformly distributed: a peer made them
            raise TableFullError
        if depth == self._bits:
            self._directory = np.repeat(self._directory, 2)
            self._bits += 1
        new = self.segments
        self._depths[segment] = depth + 1
        self._depths.append(depth + 1)
        entries = np.flatnonzero(self._directory == segment)
        self._directory[entries[len(entries) // 2 :]] = new
        old_rows = slice(segment * BUCKETS, (segment + 1) * BUCKETS)
        new_rows = slice(new * BUCKETS, (new + 1) * BUCKETS)
        keys = self._keys[old_rows]
        moved = keys >> np.uint64(63 - depth) & np.uint64(1) == 1
        self._keys[new_rows][moved] = keys[moved]
        self._values[new_rows][moved] = self._values[old_rows][moved]
        keys[moved] = _EMPTY


FEW_BITS = 8  # up to so many bits of a set are found sooner one by one than all in an array
NO_HOLDER = np.iinfo(np.int32).max


class HolderSets:
    """The stored sets, and how many blocks have each of them."""

    def __init__(self) -> None:
        self._masks: list[int] = []
        self._uses: list[int] = []
        self._codes: dict[int, int] = {}
        self._unused: list[int] = []

    def __len__(self) -> int:
        return len(self._codes)

    def mask(self, code: int) -> int:
        """The set as a bit mask."""
        return 1 << code if code >= 0 else self._masks[-1 - code]

    def changed(self, codes: Values, bit: int, *, holds: bool) -> Values:
        """The codes of the same sets with the bit, or without it; NO_HOLDER for empty ones.

        From then on the blocks count for the returned codes.
        """
        one = 1 << bit
        return self._replaced(codes, (lambda mask: mask | one) if holds else (lambda mask: mask & ~one))

    def without(self, codes: Values, bits: int) -> Values:
        """The codes of the same sets without these bits, in the same way."""
        return self._replaced(codes, lambda mask: mask & ~bits)

    def _replaced(self, codes: Values, change: Callable[[int], int]) -> Values:
        if not len(codes):
            return codes
        found, inverse, counts = np.unique(codes, return_inverse=True, return_counts=True)
        new = np.empty_like(found)
        for index, (code, count) in enumerate(zip(found.tolist(), counts.tolist(), strict=True)):
            mask = self.mask(code)
            changed = change(mask)
            new[index] = code if changed == mask else self._moved(code, changed, count)
        return new[inverse]

    def _moved(self, code: int, mask: int, count: int) -> int:
        """The code of `mask`, after that many blocks have it instead of `code`."""
        other = self._code(mask)
        if other < 0:
            self._uses[-1 - other] += count
        if code < 0:
            place = -1 - code
            self._uses[place] -= count
            if not self._uses[place]:
                del self._codes[self._masks[place]]
                self._unused.append(place)
        return other

    def _code(self, mask: int) -> int:
        if not mask:
            return NO_HOLDER
        if not mask & (mask - 1):
            return mask.bit_length() - 1
        code = self._codes.get(mask)
        if code is None:
            if self._unused:
                place = self._unused.pop()
                self._masks[place] = mask
            else:
                place = len(self._masks)
                self._masks.append(mask)
                self._uses.append(0)
            code = self._codes[mask] = -1 - place
        return code


def members(mask: int) -> NDArray[np.int64]:
    """The numbers of the bits that are set."""
    if mask.bit_count() <= FEW_BITS:
        found = []
        while mask:
            found.append(mask.bit_length() - 1)
            mask ^= 1 << found[-1]
        return np.array(found[::-1], np.int64)
    bits = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little"))


SAMPLED = 8  # one of so many blocks is followed
REMEMBERED = 65_536  # dropped blocks that are followed at the same time
WINDOW = 2_048  # followed blocks that the share is a mean of
PRIOR = 32  # blocks of which half are asked for again, until more is known


class ReuseShare:
    """The share of dropped blocks that are asked for again, of all replicas together. Only full caches drop blocks."""

    def __init__(self) -> None:
        # The oldest first. Removing the first of a plain dict takes longer with every one that was removed before it.
        self._dropped: OrderedDict[int, None] = OrderedDict()
        self._drops = float(PRIOR)
        self._asked = PRIOR / 2

    @property
    def share(self) -> float:
        """0 to 1."""
        return min(1.0, self._asked / self._drops)

    def dropped(self, digests: Digests) -> None:
        """A replica has dropped these blocks."""
        followed = digests[digests % np.uint64(SAMPLED) == 0].tolist()
        if not followed:
            return
        self._drops += len(followed)
        self._dropped.update(dict.fromkeys(followed))
        while len(self._dropped) > REMEMBERED:
            self._dropped.popitem(last=False)
        if self._drops > 2 * WINDOW:
            self._drops /= 2
            self._asked /= 2

    def asked(self, digests: Digests) -> None:
        """A prompt has these blocks."""
        if not self._dropped:
            return
        for digest in digests[digests % np.uint64(SAMPLED) == 0].tolist():
            if digest in self._dropped:
                del self._dropped[digest]
                self._asked += 1


FIRST_LOOKUP = 64  # blocks of a prompt; four times as many follow, as long as none is missing
HASH_BYTES = 16  # bytes of a block's hash, as replicas report it
Lengths = NDArray[np.int64]


class PrefixIndex:
    """Blocks by the first 8 bytes of their hash.

    Two blocks with equal beginnings are taken for one: of 10 million blocks, one lookup in a million million. Only a
    decision is a little worse then, since replicas compare tokens. Blocks that do not fit are not stored.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._table = DigestTable(max_blocks)
        self._sets = HolderSets()
        self.reuse = ReuseShare()
        self.on_drop: Callable[[Digests], None] | None = None  # called with blocks that a replica has dropped
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

    def dropped(self, digests: Digests) -> None:
        """A replica has dropped these blocks for others."""
        self.reuse.dropped(digests)
        if self.on_drop is not None:
            self.on_drop(digests)

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

    def count(self, digests: Digests, lengths: Lengths) -> Lengths:
        """By slot: how many of so many leading blocks of a prompt each replica has, [slots]. lengths: by slot."""
        counts = np.zeros(self._slots, np.int64)
        if not lengths.any():
            return counts
        count, runs = self._runs(digests)
        having = 0
        for start, code in runs:
            mask = self._held_bits(self._sets.mask(code) & self._open)
            for sign, changed in ((1, having & ~mask), (-1, mask & ~having)):  # most sets are those of the run before
                slots = members(changed) // 2
                counts[slots] += sign * np.minimum(lengths[slots], start)
            having = mask
        slots = members(having) // 2
        counts[slots] += np.minimum(lengths[slots], count)
        return counts

    @property
    def crowded(self) -> bool:
        """Whether the rest is for blocks that are in caches."""
        return 2 * self._table.count > self._max_blocks

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
        """How many leading blocks of a prompt the table has; where each run with one code starts, and the code.

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

    def _store(self, places: Positions, before: Values, codes: Values) -> None:
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
