"""The blocks of one replica in the index, from the events that it sends and the prompts that are sent to it."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Self

import numpy as np
from numpy.typing import NDArray

from headrace_proto.block_hash import BlockHasher, CacheScope
from headrace_proto.replica_pb2 import CacheEvent, CacheFrame, ModelFacts
from headrace_router.core.prefix_index import Digests, Lengths, PrefixIndex, TableFullError, digests_of

MAX_EXPECTED = 2048  # blocks of one prompt that an attempt is expected to leave; of a longer one its beginning
MAX_COVERED = 1 << 19  # blocks x replicas of a group with a window: some milliseconds


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """A prompt's full blocks in one cache group."""

    window: int  # tokens that a query sees, itself included; 0 = all
    digests: Digests
    snapshot: int | None = None  # blocks before a prompt's snapshot of recurrent state; None: keys and values


@dataclass(frozen=True)
class PromptBlocks:
    """A prompt's full blocks in every cache group, the same number in each."""

    block_size: int  # tokens
    groups: Sequence[GroupBlocks]

    @cached_property
    def digests(self) -> Digests:
        """The digests of all groups with keys and values."""
        return np.concatenate([group.digests for group in self.groups if group.snapshot is None])

    @cached_property
    def expected(self) -> Digests:
        """Distinct ones that a replica which computes the prompt will have: the same array for all attempts."""
        most = MAX_EXPECTED // sum(group.snapshot is None for group in self.groups)
        kept = []
        for group in self.groups:
            last = most if group.snapshot is None else min(most, group.snapshot)
            kept.append(group.digests[0 if group.snapshot is None else last - 1 : last])
        return np.unique(np.concatenate(kept))

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

    def offloaded_tokens(self, index: PrefixIndex, cached: Lengths) -> Lengths:
        """By slot of offloaded blocks: of that many cached tokens, how many are not in the cache itself, [slots].

        Groups with a window are not counted: few of their blocks are loaded, and those are loaded beside the others.
        """
        most = np.zeros(index.slots, np.int64)
        for group in self.groups:
            if group.window:
                continue
            most = np.maximum(most, index.count(group.digests, cached // self.block_size))
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


NO_ADAPTER = ""
MAX_BLOCKS = 1 << 18  # blocks of one prompt, in all cache groups: each block is hashed and looked up


@dataclass(frozen=True, slots=True)
class HashScheme:
    """The same for all replicas of a model with one dtype, layout and cluster secret. The key is secret."""

    key: bytes
    model: str
    revision: str
    dtype: str
    kv_dtype: str
    layout_version: int
    block_size: int
    windows: tuple[int, ...]  # by cache group; 0 = all
    states: bool = False  # the last group is of snapshots of recurrent state

    @classmethod
    def of(cls, facts: ModelFacts) -> Self | None:
        """None for a replica without a prefix cache, or whose prompts have too many blocks."""
        identity, layout = facts.identity, facts.identity.kv_layout
        if not facts.cache_key or not layout.block_size:
            return None
        if len(layout.groups) * -(-facts.max_model_len // layout.block_size) > MAX_BLOCKS:
            return None
        groups = sorted(layout.groups, key=lambda group: group.index)
        return cls(
            facts.cache_key,
            identity.model,
            identity.revision,
            identity.dtype,
            identity.kv_dtype,
            layout.version,
            layout.block_size,
            tuple(group.window for group in groups),
            any(group.state for group in groups),
        )

    def blocks(self, tenant_salt: bytes, token_ids: Sequence[int]) -> PromptBlocks:
        """The full blocks of a tenant's prompt. About 1 ms for 8,192 tokens: call it off the event loop."""
        hasher = BlockHasher(self.key)
        groups = []
        for group, window in enumerate(self.windows):
            scope = CacheScope(
                tenant_salt=tenant_salt,
                model=self.model,
                revision=self.revision,
                adapter=NO_ADAPTER,
                dtype=self.dtype,
                kv_dtype=self.kv_dtype,
                layout_version=self.layout_version,
                block_size=self.block_size,
                group=group,
            )
            hashes = hasher.chain(hasher.root(scope), token_ids, self.block_size)
            snapshot = None
            if self.states and group == len(self.windows) - 1:
                snapshot = max(1, (len(token_ids) - 1) // self.block_size - 1)
            groups.append(GroupBlocks(window, digests_of(hashes), snapshot))
        return PromptBlocks(self.block_size, tuple(groups))


EXPECTED_SECONDS = 5.0  # after the end of an attempt: the events of its blocks have come by then
MAX_EVENTS = 1024  # events of one frame; a replica sends one event per cache group, and one that clears
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
        self.offloaded_slot: int | None = None  # slot of blocks only in host memory or on disk, if there were any
        self.complete = False  # the blocks are those of a snapshot and all increments since
        self.held = 0  # blocks that the replica has
        self.full = False  # the index had no place for some of them
        self._cleared: list[int] = []  # slots that it has closed
        self.state_group = -1  # that of snapshots of recurrent state, which are dropped as soon as a newer one is there
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
            remove = partial(self._remove, followed=event.group != self.state_group)
            changes = ((event.removed, remove), (event.offloaded, self._add_offloaded), (event.stored, self._add))
            for hashes, apply in changes:
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
        self._close_slots()

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
        self._cleared.append(self.slot)
        self._close_slots()
        self.slot = self._index.open()
        self.full, self.held = False, 0
        expected = list(self._attempts)
        for start in range(0, len(expected), SLICE_HASHES):
            some = [digest for digest in expected[start : start + SLICE_HASHES] if digest in self._attempts]
            self._store(np.array(some, np.uint64), expected=True)
            yield

    def _remove(self, digests: Digests, *, followed: bool) -> None:
        digests = np.unique(digests)
        self._end_expectation(digests)
        self._end_offload(digests)
        removed = self._index.remove(self.slot, digests)
        # An increment may also remove what was stored and removed since the last one.
        self.held = max(0, self.held - (len(digests) if self.full else removed))
        if followed:
            self._index.dropped(digests)

    def _add(self, digests: Digests) -> None:
        digests = np.unique(digests)  # the table requires it; a peer may send anything
        self._end_expectation(digests)
        self._end_offload(digests)
        self.held += self._store(digests, expected=False)

    def _add_offloaded(self, digests: Digests) -> None:
        if self._index.crowded:
            self._remove(digests, followed=True)
            return
        self._add(digests)
        if self.offloaded_slot is None:
            self.offloaded_slot = self._index.open()
        try:
            self._index.store(self.offloaded_slot, np.unique(digests))
        except TableFullError:
            self.full = True

    def _end_offload(self, digests: Digests) -> None:
        if self.offloaded_slot is not None:
            self._index.remove(self.offloaded_slot, digests)

    def _close_slots(self) -> None:
        self._index.close(self.slot)
        if self.offloaded_slot is not None:
            self._index.close(self.offloaded_slot)
            self.offloaded_slot = None

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
