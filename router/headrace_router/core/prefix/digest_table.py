"""A hash table from digests to small integers, in arrays: a few calls look up or store many digests.

    digest ─ leading bits ─▶ directory ─▶ segment ─ other bits ─▶ two buckets of 8 places, one of which has it

A segment that is full is split in two by one more bit (extendible hashing: Fagin, Nievergelt, Pippenger and Strong,
1979), so that no call moves more than a few segments' entries. Of its two buckets a digest is put into the emptier one
(Azar, Broder, Karlin and Upfal, Balanced Allocations, 1999), so that segments are almost full before they are split.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Digests: TypeAlias = NDArray[np.uint64]
Values: TypeAlias = NDArray[np.int32]
Places: TypeAlias = NDArray[np.int64]

BUCKET_PLACES = 8
BUCKETS = 512  # of a segment
SEGMENT_PLACES = BUCKETS * BUCKET_PLACES
NOWHERE = -1
SPARE_BITS = 4  # of the directory, beyond those that uniformly distributed digests need

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

    def find(self, digests: Digests) -> Places:
        """The place of each digest, NOWHERE for those that it does not have."""
        rows = self._rows(digests)
        found = (self._keys[rows] == digests[:, None, None]).reshape(len(digests), 2 * BUCKET_PLACES)
        column = found.argmax(axis=1)
        entry = np.arange(len(digests))
        places = rows[entry, column // BUCKET_PLACES] * BUCKET_PLACES + column % BUCKET_PLACES
        return np.where(found[entry, column], places, NOWHERE)

    def values(self, places: Places) -> Values:
        """The values at places that `find` returned, none of them NOWHERE."""
        return self._values.reshape(-1)[places]

    def replace(self, places: Places, values: Values) -> None:
        """Stores other values at such places."""
        self._values.reshape(-1)[places] = values

    def remove(self, places: Places) -> None:
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

    def filled(self, segment: int) -> tuple[Places, Values]:
        """The places of a segment that have digests, and their values."""
        rows = slice(segment * BUCKETS, (segment + 1) * BUCKETS)
        inside = np.flatnonzero(self._keys[rows].reshape(-1))
        return inside + segment * SEGMENT_PLACES, self._values[rows].reshape(-1)[inside]

    def _rows(self, digests: Digests) -> Places:
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
