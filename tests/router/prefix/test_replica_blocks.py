"""A router's view of a replica's cache after random changes, lost messages and restarts: it equals the cache."""

import asyncio
import random
from collections.abc import AsyncIterator

import numpy as np
import pytest

from headrace_proto.replica_pb2 import CacheEvent, CacheFrame
from headrace_router.core.prefix_index import PrefixIndex, digests_of
from headrace_router.core.replica_blocks import (
    EXPECTED_SECONDS,
    SLICE_HASHES,
    GroupBlocks,
    MissedEventsError,
    PromptBlocks,
    ReplicaBlocks,
)
from headrace_worker.core.kv.blocks import CacheChange
from headrace_worker.server import cache_events
from headrace_worker.server.cache_events import CacheEventHub

HASHES = [bytes([number]) * 16 for number in range(1, 60)]
ALL = digests_of(HASHES)


class Replica:
    """A cache with two groups, and the hub that reports its changes."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.held: set[bytes] = set()
        self.offloaded: set[bytes] = set()  # of these
        self.hub = CacheEventHub(chance.randbytes(16))

    def step(self) -> None:
        changes = []
        for digest in self.chance.sample(HASHES, self.chance.randrange(1, 12)):
            stored = self.chance.random() < 0.6
            offloaded = not stored and self.chance.random() < 0.5
            changes.append(CacheChange(HASHES.index(digest) % 2, digest, stored, offloaded))
            (self.held.add if stored or offloaded else self.held.discard)(digest)
            (self.offloaded.add if offloaded else self.offloaded.discard)(digest)
        self.hub.publish(changes)


def held(index: PrefixIndex, blocks: ReplicaBlocks) -> set[bytes]:
    return in_slot(index, blocks.slot)


def in_slot(index: PrefixIndex, slot: int | None) -> set[bytes]:
    if slot is None:
        return set()
    found = index.holders(ALL, np.array([slot]))[:, 0]
    return {digest for digest, has in zip(HASHES, found.tolist(), strict=True) if has}


async def follow(replica: Replica, blocks: ReplicaBlocks, steps: int) -> int:
    """Runs that many steps, and reads what arrives; some messages are lost. Returns how often a snapshot was needed."""
    chance, snapshots = replica.chance, 1
    watch: AsyncIterator[CacheFrame] = replica.hub.watch(0.0)
    reading: asyncio.Task[CacheFrame] | None = None
    for turn in range(steps + 20):
        if turn < steps:
            replica.step()
        await asyncio.sleep(0.001)
        while True:
            reading = reading or asyncio.ensure_future(anext(watch))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if not reading.done():
                break
            frame, reading = reading.result(), None
            if turn < steps and chance.random() < 0.1:
                continue  # it is lost
            try:
                blocks.receive(frame)
            except MissedEventsError:
                blocks.lost()
                watch, snapshots = replica.hub.watch(0.0), snapshots + 1
    if reading is not None:
        reading.cancel()
    return snapshots


@pytest.mark.parametrize("seed", range(6))
def test_it_equals_the_replicas_cache(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "LEAST_SECONDS", 0.001)
    monkeypatch.setattr(cache_events, "SNAPSHOT_CHUNK", 7)
    chance = random.Random(seed)
    index = PrefixIndex(1 << 14)
    routers = [ReplicaBlocks(index), ReplicaBlocks(index)]

    async def run() -> None:
        needed = 0
        for _ in range(3):  # the replica restarts, with an empty cache
            replica = Replica(chance)
            for router in routers:
                router.lost()
            needed += sum(await asyncio.gather(*(follow(replica, router, 60) for router in routers)))
            # The last messages may have been lost: the next one shows it.
            for router in routers:
                known = held(index, router), in_slot(index, router.offloaded_slot)
                if not router.complete or known != (replica.held, replica.offloaded):
                    router.lost()
                    await follow(replica, router, 0)
                assert held(index, router) == replica.held and router.complete
                assert in_slot(index, router.offloaded_slot) == replica.offloaded
        assert needed > 6, "messages were lost"

    asyncio.run(run())


def frame(boot: bytes = b"a", sequence: int = 1, **fields: object) -> CacheFrame:
    return CacheFrame(boot_id=boot, sequence=sequence, **fields)  # type: ignore[arg-type]


def test_increments_must_follow_a_snapshot_without_a_gap() -> None:
    index = PrefixIndex(1 << 14)
    blocks = ReplicaBlocks(index)
    stored = [CacheEvent(stored=HASHES[:3])]
    with pytest.raises(MissedEventsError):
        blocks.receive(frame(events=stored))
    blocks.receive(frame(snapshot=True, events=[CacheEvent(cleared=True), *stored]))
    assert not blocks.complete and held(index, blocks) == set(HASHES[:3]), "what came so far counts"
    blocks.receive(frame(snapshot=True, snapshot_end=True, events=[CacheEvent(stored=HASHES[3:4])]))
    assert blocks.complete
    blocks.receive(frame(sequence=2, events=[CacheEvent(removed=HASHES[:1])]))
    for wrong in (frame(sequence=4), frame(sequence=2), frame(boot=b"b", sequence=3)):
        with pytest.raises(MissedEventsError):
            blocks.receive(wrong)
        assert held(index, blocks) == set(HASHES[1:4]), "the last known ones count until the next snapshot"
        blocks.receive(frame(sequence=2, snapshot=True, snapshot_end=True, events=[CacheEvent(stored=HASHES[1:4])]))
    blocks.receive(frame(sequence=3, events=[CacheEvent(cleared=True, stored=HASHES[9:10])]))
    assert held(index, blocks) == {HASHES[9]}
    blocks.close()
    assert not index.match(ALL).any()


def test_offloaded_blocks_count_as_cached_and_are_known_to_be_loaded_first() -> None:
    index = PrefixIndex(1 << 14)
    blocks, other = ReplicaBlocks(index), ReplicaBlocks(index)
    for one in (blocks, other):
        one.receive(frame(snapshot=True, snapshot_end=True, events=[CacheEvent(stored=HASHES[:20])]))
    blocks.receive(frame(sequence=2, events=[CacheEvent(offloaded=HASHES[6:20])]))
    blocks.receive(frame(sequence=3, events=[CacheEvent(stored=HASHES[8:10])]))
    assert blocks.offloaded_slot is not None and other.offloaded_slot is None
    prompt = PromptBlocks(4, [GroupBlocks(0, ALL)])
    cached = prompt.cached_tokens(index, 1000)
    assert (cached[blocks.slot], cached[other.slot]) == (80, 80)
    for tokens, expected in ((80, 48), (40, 8), (20, 0)):
        lengths = np.zeros(index.slots, np.int64)
        lengths[blocks.offloaded_slot] = tokens
        counted = prompt.offloaded_tokens(index, lengths)
        assert counted[blocks.offloaded_slot] == expected == counted.sum()
    slot = blocks.offloaded_slot
    blocks.receive(frame(sequence=4, snapshot=True, snapshot_end=True, events=[CacheEvent(stored=HASHES[:3])]))
    assert blocks.offloaded_slot is None and in_slot(index, slot) == set()


def test_snapshots_that_are_dropped_say_nothing_of_the_caches() -> None:
    """A newer one of the same answer takes their place."""
    shares = []
    for group in (0, 1):
        index = PrefixIndex(1 << 14)
        blocks = ReplicaBlocks(index)
        blocks.state_group = 1
        events = [CacheEvent(group=group, stored=HASHES)]
        blocks.receive(frame(snapshot=True, snapshot_end=True, events=events))
        blocks.receive(frame(sequence=2, events=[CacheEvent(group=group, removed=HASHES)]))
        index.reuse.asked(ALL)
        shares.append(index.reuse.share)
    assert shares[0] > shares[1] == PrefixIndex(1 << 14).reuse.share


def test_blocks_just_sent_are_expected() -> None:
    """So that siblings go together, before the replica reports any of their blocks."""
    index = PrefixIndex(1 << 14)
    blocks, prompt = ReplicaBlocks(index), ALL[:10]

    def expected() -> int:
        return int(index.match(prompt)[blocks.slot])

    blocks.expect(b"1", prompt[:6])
    blocks.expect(b"2", prompt[:8])
    assert expected() == 8
    blocks.ended(b"2", 100.0)
    blocks.ended(b"unknown", 100.0)
    blocks.expire(100.0 + EXPECTED_SECONDS - 0.1, 99)
    assert expected() == 8
    blocks.expire(100.0 + EXPECTED_SECONDS, 99)
    assert expected() == 6, "the other attempt expects these"
    snapshot = frame(snapshot=True, snapshot_end=True, events=[CacheEvent(cleared=True, stored=HASHES[:2])])
    blocks.receive(snapshot)
    assert expected() == 6, "a snapshot replaces only what the replica holds"
    blocks.ended(b"1", 200.0)
    blocks.expire(300.0, 99)
    assert expected() == 2
    assert not blocks._expected and not blocks._attempts and not blocks._ended


def test_what_the_replica_reports_of_a_block_ends_the_expectation() -> None:
    """Else a block would count for seconds after its cache has dropped it."""
    index = PrefixIndex(1 << 14)
    blocks, prompt = ReplicaBlocks(index), ALL[:3]
    blocks.receive(frame(snapshot=True, snapshot_end=True, sequence=1))
    blocks.expect(b"1", prompt)
    blocks.receive(frame(sequence=2, events=[CacheEvent(stored=HASHES[:2])]))
    assert index.match(prompt)[blocks.slot] == 3 and index.match(prompt, held=True)[blocks.slot] == 2
    before = index.reuse.share
    blocks.receive(frame(sequence=3, events=[CacheEvent(removed=HASHES[:2])]))
    assert index.match(prompt)[blocks.slot] == 0 and index.reuse.share <= before
    blocks.ended(b"1", 1.0)
    blocks.expire(100.0, 99)
    assert not blocks._expected and not blocks._attempts


def test_what_an_attempt_did_not_compute_is_not_expected() -> None:
    """Refused by the replica, or cancelled before: its prefix would draw others there."""
    index = PrefixIndex(1 << 14)
    blocks = ReplicaBlocks(index)
    blocks.expect(b"1", ALL[:5])
    blocks.expect(b"2", ALL[:9])
    blocks.ended(b"1", 10.0)
    blocks.ended(b"2", 11.0, computed=False)
    blocks.expire(11.1, 99)
    assert index.match(ALL[:9])[blocks.slot] == 5
    blocks.expire(10.0 + EXPECTED_SECONDS, 99)
    assert not blocks._expected and not blocks._attempts


def _increment(stored: int, removed: int) -> CacheFrame:
    """Removes the last ones that it stores first."""
    hashes = [number.to_bytes(16, "little") for number in range(1, stored + 1)]
    return frame(sequence=2, events=[CacheEvent(stored=hashes), CacheEvent(removed=hashes[stored - removed :])])


def test_a_large_frame_is_applied_in_slices() -> None:
    index = PrefixIndex(1 << 14)
    blocks = ReplicaBlocks(index)
    blocks.receive(frame(snapshot=True, snapshot_end=True))
    seen = [index.blocks for _ in blocks.slices(_increment(4000, 1500))]
    assert len(seen) >= 5500 // SLICE_HASHES - 1 and seen == sorted(seen[:7]) + sorted(seen[7:], reverse=True)
    assert max(np.abs(np.diff(seen))) <= SLICE_HASHES
    assert index.blocks == blocks.held == 2500
    assert not list(blocks.slices(frame(sequence=3, events=[CacheEvent(stored=HASHES[:9])]))), (
        "small ones have no pause"
    )


def test_a_frame_that_is_not_finished_makes_a_snapshot_necessary() -> None:
    index = PrefixIndex(1 << 14)
    blocks = ReplicaBlocks(index)
    blocks.receive(frame(snapshot=True, snapshot_end=True))
    next(blocks.slices(_increment(4000, 0)))
    blocks.lost()
    with pytest.raises(MissedEventsError):
        blocks.receive(frame(sequence=3, events=[CacheEvent(stored=HASHES[:1])]))
    blocks.receive(frame(snapshot=True, snapshot_end=True, sequence=3, events=[CacheEvent(stored=HASHES[:2])]))
    assert held(index, blocks) == set(HASHES[:2]) and blocks.held == 2


def test_an_index_without_place_is_noticed() -> None:
    index = PrefixIndex(1)
    blocks = ReplicaBlocks(index)
    many = np.random.default_rng(1).bytes(16 * 9000)
    hashes = [many[start : start + 16] for start in range(0, len(many), 16)]
    blocks.receive(frame(snapshot=True, snapshot_end=True, events=[CacheEvent(cleared=True, stored=hashes)]))
    assert blocks.full and blocks.complete and index.blocks > 5000
    blocks.receive(frame(snapshot=True, snapshot_end=True, events=[CacheEvent(cleared=True)]))
    assert not blocks.full
