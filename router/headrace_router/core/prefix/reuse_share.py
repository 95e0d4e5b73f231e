"""Which share of the blocks that replicas drop is asked for again: what dropping one costs. Pure."""

from collections import OrderedDict

import numpy as np

from headrace_router.core.prefix.digest_table import Digests

SAMPLED = 8  # one of so many blocks is followed
REMEMBERED = 65_536  # dropped blocks that are followed at the same time
WINDOW = 2_048  # followed blocks that the share is a mean of
PRIOR = 32  # blocks of which half are asked for again, until more is known


class ReuseShare:
    """Of all replicas together: blocks are dropped by full caches only."""

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
