"""Sets of replicas as small integers, each set stored once: most blocks are on one replica, and the blocks of a prefix
that is on several replicas are all on the same ones.

A code of 0 or more is the set of that bit alone; a negative code is one of the stored sets, as a bit mask.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headrace_router.core.prefix.digest_table import Values

FEW_BITS = 8  # of a set: one by one they are found sooner than all in an array
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
