"""The blocks of one replica in the index, from the events that it sends and the prompts that are sent to it."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headrace_proto.replica_pb2 import CacheEvent, CacheFrame
from headrace_router.core.prefix.digest_table import Digests, TableFullError
from headrace_router.core.prefix.prefix_index import PrefixIndex, digests_of

EXPECTED_SECONDS = 5.0  # after the end of an attempt: the events of its blocks have come by then
MAX_EVENTS = 1024  # of one frame; a replica sends one per cache group, and one that clears
SLICE_HASHES = 512  # that are applied without a pause: a few ms of the event loop
CALL_HASHES = 16  # that cost as much as a change of a few does
FORGET_HASHES = 128  # that forgetting a prompt costs as much as, beside its own
MAX_CLEARED = 8  # times that a replica's blocks may be cleared until the index has swept them


class MissedEventsError(Exception):
    """Events of the replica are missing, or cannot be used: it must be asked for a snapshot."""


@dataclass(slots=True)
class _Prompt:
    """What attempts with one prompt are expected to leave."""

    digests: Digests  # as they were passed
    expected: list[int]
    attempts: int = 0


class ReplicaBlocks:
    """Follows a replica: a snapshot in several frames, then increments with consecutive numbers.

    While a snapshot arrives the blocks that came so far count. After a gap the last known ones count, until the next
    snapshot begins.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self.slot = index.open()
        self.complete = False  # the blocks are those of a snapshot and all increments since
        self.held = 0  # blocks that the replica has
        self.full = False  # the index had no place for some of them
        self._cleared: list[int] = []  # slots that it has closed
        self._closed = False
        self._boot_id = b""
        self._sequence = 0
        self._in_snapshot = False
        self._expected: dict[bytes, _Prompt] = {}  # by attempt
        self._prompts: dict[int, _Prompt] = {}  # by the identity of their digests, which they keep
        self._attempts: Counter[int] = Counter()  # prompts with each expected block
        self._ended: deque[tuple[float, bytes]] = deque()

    def receive(self, frame: CacheFrame) -> None:
        """Applies one frame of the replica at once. Raises MissedEventsError."""
        for _ in self.slices(frame):
            pass

    def slices(self, frame: CacheFrame) -> Iterator[None]:
        """Applies one frame, with pauses between slices. Raises MissedEventsError.

        If it is not continued after a pause, call `lost`.
        """
        events: Sequence[CacheEvent] = frame.events
        if self._closed:  # read before its stream was cancelled
            return
        if len(events) > MAX_EVENTS:
            self.complete = False
            raise MissedEventsError
        if frame.snapshot:
            if not self._in_snapshot:
                yield from self._cleared_slices()
            self._in_snapshot, self.complete = not frame.snapshot_end, frame.snapshot_end
            self._boot_id = frame.boot_id
        elif not self.complete or frame.boot_id != self._boot_id or frame.sequence != self._sequence + 1:
            self.complete = False
            raise MissedEventsError
        self._sequence = frame.sequence
        if not frame.snapshot:
            last = max((place for place, event in enumerate(events) if event.cleared), default=-1)
            if last >= 0:  # what came before it is gone
                yield from self._cleared_slices()
                events = events[last:]
        applied = 0
        for event in events:
            for hashes, apply in ((event.removed, self._remove), (event.stored, self._add)):
                for start in range(0, len(hashes), SLICE_HASHES):
                    if applied >= SLICE_HASHES:
                        applied = 0
                        yield
                    some = hashes[start : start + SLICE_HASHES]
                    apply(digests_of(some))
                    applied += CALL_HASHES + len(some)

    def may_receive(self, frame: CacheFrame) -> bool:
        """Whether the index has swept what earlier frames cleared: one that clears again waits for that."""
        self._cleared = [slot for slot in self._cleared if self._index.closing(slot)]
        clears = frame.snapshot or any(event.cleared for event in frame.events[:MAX_EVENTS])
        return not clears or len(self._cleared) < MAX_CLEARED

    def lost(self) -> None:
        """The stream has ended, maybe within a snapshot: the next one begins with another."""
        self.complete = self._in_snapshot = False

    def close(self) -> None:
        """The replica has left: it is not used again."""
        self._closed = True
        self._index.close(self.slot)

    def expect(self, attempt_id: bytes, digests: Digests) -> None:
        """The replica computes these distinct blocks for an attempt, or has them.

        Attempts that pass the same array, such as those of a request's choices, cost what one of them does.
        """
        prompt = self._prompts.get(id(digests))
        if prompt is None:
            prompt = self._prompts[id(digests)] = _Prompt(digests, digests.tolist())
            new = [digest for digest in prompt.expected if digest not in self._attempts]
            self._attempts.update(prompt.expected)
            self._store(np.array(new, np.uint64), expected=True)
        prompt.attempts += 1
        self._expected[attempt_id] = prompt

    def ended(self, attempt_id: bytes, now: float, *, computed: bool = True) -> None:
        """The attempt has ended: its blocks are expected for EXPECTED_SECONDS more, if it computed any.

        Others are ignored.
        """
        if attempt_id not in self._expected:
            return
        if computed:
            self._ended.append((now + EXPECTED_SECONDS, attempt_id))
        else:
            self._ended.appendleft((now, attempt_id))

    def expire(self, now: float, most: int) -> int:
        """Forgets what attempts that ended some time ago were expected to leave: about `most` blocks.

        Returns how many of these are left; the rest follows with the next call.
        """
        while self._ended and self._ended[0][0] <= now and most > 0:
            _, attempt_id = self._ended.popleft()
            prompt = self._expected.pop(attempt_id)
            prompt.attempts -= 1
            most -= 1
            if not prompt.attempts:
                del self._prompts[id(prompt.digests)]
                # Each is looked at, whether others expect it, too, or it has come.
                most -= FORGET_HASHES + len(prompt.expected)
                self._forget(prompt.expected)
        return most

    def _forget(self, digests: Sequence[int]) -> None:
        gone = []
        for digest in digests:
            if digest not in self._attempts:
                continue  # the replica has reported it since
            self._attempts[digest] -= 1
            if not self._attempts[digest]:
                del self._attempts[digest]
                gone.append(digest)
        self._index.remove(self.slot, np.array(gone, np.uint64), expected=True)

    def _cleared_slices(self) -> Iterator[None]:
        """Forgets what the replica holds; what it will hold stays, and is stored in slices, with a pause after each."""
        self._index.close(self.slot)
        self._cleared.append(self.slot)
        self.slot = self._index.open()
        self.full, self.held = False, 0
        expected = list(self._attempts)
        for start in range(0, len(expected), SLICE_HASHES):
            some = [digest for digest in expected[start : start + SLICE_HASHES] if digest in self._attempts]
            self._store(np.array(some, np.uint64), expected=True)
            yield

    def _remove(self, digests: Digests) -> None:
        digests = np.unique(digests)
        self._end_expectation(digests)
        removed = self._index.remove(self.slot, digests)
        # An increment may also remove what was stored and removed since the last one.
        self.held = max(0, self.held - (len(digests) if self.full else removed))
        self._index.reuse.dropped(digests)

    def _add(self, digests: Digests) -> None:
        digests = np.unique(digests)  # the table requires it; a peer may send anything
        self._end_expectation(digests)
        self.held += self._store(digests, expected=False)

    def _end_expectation(self, digests: Digests) -> None:
        """What the replica reports of a block counts from now on, not what was expected of it."""
        if not self._attempts:
            return
        known = [digest for digest in digests.tolist() if digest in self._attempts]
        for digest in known:
            del self._attempts[digest]
        self._index.remove(self.slot, np.array(known, np.uint64), expected=True)

    def _store(self, digests: Digests, *, expected: bool) -> int:
        """Returns how many of them it did not have, as far as the index has a place for them."""
        try:
            return self._index.store(self.slot, digests, expected=expected)
        except TableFullError:
            self.full = True
            return len(digests)
