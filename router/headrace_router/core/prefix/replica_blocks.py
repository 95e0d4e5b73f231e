"""The blocks of one replica in the index, from the events that it sends and the prompts that are sent to it."""

from collections import Counter, deque
from collections.abc import Iterable

import numpy as np

from headrace_proto.replica_pb2 import CacheFrame
from headrace_router.core.prefix.digest_table import Digests, TableFullError
from headrace_router.core.prefix.prefix_index import PrefixIndex, digests_of

EXPECTED_SECONDS = 5.0  # after the end of an attempt: the events of its blocks have come by then
MAX_EXPECTED = 4096  # blocks of one attempt: of longer prompts the others count once they are reported


class MissedEventsError(Exception):
    """Events of the replica are missing: it must be asked for a snapshot."""


class ReplicaBlocks:
    """Follows a replica: a snapshot in several frames, then increments with consecutive numbers.

    While a snapshot arrives the blocks that came so far count. After a gap the last known ones count, until the next
    snapshot begins.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self.slot = index.open()
        self.complete = False  # the blocks are those of a snapshot and all increments since
        self.full = False  # the index had no place for some of them
        self._boot_id = b""
        self._sequence = 0
        self._in_snapshot = False
        self._expected: dict[bytes, Digests] = {}  # by attempt
        self._attempts: Counter[int] = Counter()  # with each expected block
        self._ended: deque[tuple[float, bytes]] = deque()

    def receive(self, frame: CacheFrame) -> None:
        """Applies one frame of the replica. Raises MissedEventsError."""
        if frame.snapshot:
            if not self._in_snapshot:
                self._clear()
            self._in_snapshot, self.complete = not frame.snapshot_end, frame.snapshot_end
            self._boot_id = frame.boot_id
        elif not self.complete or frame.boot_id != self._boot_id or frame.sequence != self._sequence + 1:
            self.complete = False
            raise MissedEventsError
        self._sequence = frame.sequence
        for event in frame.events:
            if event.cleared and not frame.snapshot:
                self._clear()
            self._apply(event.removed, event.stored)

    def lost(self) -> None:
        """The stream has ended, maybe within a snapshot: the next one begins with another."""
        self.complete = self._in_snapshot = False

    def close(self) -> None:
        """The replica has left: it is not used again."""
        self._index.close(self.slot)

    def expect(self, attempt_id: bytes, digests: Digests) -> None:
        """The replica computes these blocks for an attempt, or has them."""
        digests = np.unique(digests[:MAX_EXPECTED])
        self._expected[attempt_id] = digests
        new = [digest for digest in digests.tolist() if not self._attempts[digest]]
        self._attempts.update(digests.tolist())
        self._store(np.array(new, np.uint64), expected=True)

    def ended(self, attempt_id: bytes, now: float) -> None:
        """The attempt has ended: its blocks are expected for EXPECTED_SECONDS more. Others are ignored."""
        if attempt_id in self._expected:
            self._ended.append((now + EXPECTED_SECONDS, attempt_id))

    def expire(self, now: float) -> None:
        """Forgets what attempts that ended some time ago were expected to leave."""
        while self._ended and self._ended[0][0] <= now:
            _, attempt_id = self._ended.popleft()
            gone = []
            for digest in self._expected.pop(attempt_id).tolist():
                self._attempts[digest] -= 1
                if not self._attempts[digest]:
                    del self._attempts[digest]
                    gone.append(digest)
            self._index.remove(self.slot, np.array(gone, np.uint64), expected=True)

    def _clear(self) -> None:
        """Of what the replica holds; what it will hold stays."""
        self._index.close(self.slot)
        self.slot = self._index.open()
        self.full = False
        self._store(np.array(list(self._attempts), np.uint64), expected=True)

    def _apply(self, removed: Iterable[bytes], stored: Iterable[bytes]) -> None:
        if gone := list(removed):
            self._index.remove(self.slot, digests_of(gone))
        if new := list(stored):
            self._store(digests_of(new), expected=False)

    def _store(self, digests: Digests, *, expected: bool) -> None:
        try:
            self._index.store(self.slot, digests, expected=expected)
        except TableFullError:
            self.full = True
