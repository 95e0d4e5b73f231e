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
    FORGET_HASHES,
    MAX_CLEARED,
    MAX_EVENTS,
    SLICE_HASHES,
    MissedEventsError,
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
        self.hub = CacheEventHub(chance.randbytes(16))

    def step(self) -> None:
        changes = []
        for digest in self.chance.sample(HASHES, self.chance.randrange(1, 12)):
            stored = self.chance.random() < 0.6
            changes.append(CacheChange(HASHES.index(digest) % 2, digest, stored))
            (self.held.add if stored else self.held.discard)(digest)
        self.hub.publish(changes)


def held(index: PrefixIndex, blocks: ReplicaBlocks) -> set[bytes]:
    found = index.holders(ALL, np.array([blocks.slot]))[:, 0]
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
                if not router.complete or held(index, router) != replica.held:
                    router.lost()
                    await follow(replica, router, 0)
                assert held(index, router) == replica.held and router.complete
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


def test_blocks_that_the_replica_never_held_are_not_counted() -> None:
    """An increment has the last state of each block: stored and removed within its interval, it is removed only."""
    blocks = ReplicaBlocks(PrefixIndex(1 << 14))
    blocks.receive(frame(snapshot=True, snapshot_end=True, events=[CacheEvent(stored=HASHES[:20])]))
    for sequence in range(2, 9):
        events = [CacheEvent(removed=HASHES[20:30], stored=HASHES[5:9])]
        blocks.receive(frame(sequence=sequence, events=events))
    assert blocks.held == 20
    blocks.receive(frame(sequence=9, events=[CacheEvent(removed=HASHES[:4], stored=HASHES[30:31])]))
    assert blocks.held == 17


def test_a_frame_that_arrives_after_the_replica_has_left_takes_no_slot() -> None:
    index = PrefixIndex(1 << 14)
    blocks = ReplicaBlocks(index)
    blocks.close()
    blocks.receive(frame(snapshot=True, snapshot_end=True, events=[CacheEvent(cleared=True, stored=HASHES)]))
    index.sweep(index._table.segments)
    assert not index.blocks and index.open() == 0


@pytest.mark.parametrize("reported", [False, True])
def test_equal_prompts_expire_a_few_at_a_time(reported: bool) -> None:
    """A thousand requests that share a prompt end at once when their replica is lost: each block of each is read."""
    index = PrefixIndex(1 << 14)
    blocks = ReplicaBlocks(index)
    blocks.receive(frame(snapshot=True, snapshot_end=True, sequence=1))
    for number in range(20):
        blocks.expect(bytes([number]), ALL[:10].copy())
        blocks.ended(bytes([number]), 0.0, computed=False)
    if reported:
        blocks.receive(frame(sequence=2, events=[CacheEvent(stored=HASHES[:10])]))
    calls = 1
    while blocks.expire(1.0, 3 * (FORGET_HASHES + 11)) <= 0:
        calls += 1
    assert 6 <= calls <= 8 and not blocks._expected and not blocks._attempts


def test_attempts_with_one_prompt_cost_what_one_does() -> None:
    """The 128 choices of a request, of a prompt with thousands of blocks."""
    index = PrefixIndex(1 << 14)
    blocks, prompt = ReplicaBlocks(index), ALL[:10]
    for number in range(128):
        blocks.expect(bytes([number]), prompt)
    assert len(blocks._prompts) == 1 and set(blocks._attempts.values()) == {1}
    for number in range(127):
        blocks.ended(bytes([number]), 100.0)
    blocks.expire(200.0, 99)
    assert index.match(prompt)[blocks.slot] == 10, "one of them still runs"
    blocks.ended(bytes([127]), 100.0)
    blocks.expire(200.0, 99)
    assert index.match(prompt)[blocks.slot] == 0
    assert not blocks._expected and not blocks._attempts and not blocks._prompts


def test_one_call_forgets_a_bounded_number_of_blocks() -> None:
    index = PrefixIndex(1 << 14)
    blocks = ReplicaBlocks(index)
    for number in range(6):
        blocks.expect(bytes([number]), ALL[number * 3 : number * 3 + 3])
        blocks.ended(bytes([number]), 100.0)
    calls = 0
    while blocks._expected:
        before = len(blocks._expected)
        blocks.expire(200.0, FORGET_HASHES + 5)
        calls += 1
        assert 1 <= before - len(blocks._expected) <= 2
    assert calls == 3 and not blocks._attempts


def test_what_is_expected_stays_after_a_clear_and_is_stored_in_slices() -> None:
    """A tenant may have a thousand long prompts in flight when a replica sends a snapshot."""
    index = PrefixIndex(1 << 16)
    blocks = ReplicaBlocks(index)
    chance = np.random.default_rng(0)
    prompts = [chance.integers(1, 1 << 63, 2000, np.uint64) for _ in range(3)]
    for number, prompt in enumerate(prompts):
        blocks.expect(bytes([number]), prompt)
    clear = frame(snapshot=True, snapshot_end=True, events=[CacheEvent(cleared=True)])
    slices = blocks.slices(clear)
    for _ in range(2):
        next(slices)
    blocks.ended(b"\x02", 0.0)
    blocks.expire(100.0, 10_000)  # before its blocks are stored again
    assert len(list(slices)) >= 6000 // SLICE_HASHES - 5
    matched = [int(index.match(prompt)[blocks.slot]) for prompt in prompts]
    assert matched == [2000, 2000, 0]
    for number in range(2):
        blocks.ended(bytes([number]), 0.0)
    blocks.expire(100.0, 10_000)
    index.sweep(index._table.segments)
    assert not index.blocks and not blocks._attempts


@pytest.mark.parametrize("kind", ["equal", "same beginning", "same bits"])
def test_hashes_that_no_cache_has_take_no_memory(kind: str) -> None:
    """Of a replica that is not ours, or has a defect: digests that splitting does not separate."""
    index = PrefixIndex(1 << 24)
    blocks = ReplicaBlocks(index)
    match kind:
        case "equal":
            hashes = [b"\x07" * 16] * 40
        case "same beginning":
            hashes = [b"\x07" * 8 + number.to_bytes(8, "big") for number in range(40)]
        case _:
            hashes = [((number << 32) + 1).to_bytes(8, "little") + bytes(8) for number in range(40)]
    blocks.receive(frame(snapshot=True, snapshot_end=True, events=[CacheEvent(stored=hashes)]))
    assert len(index._table._directory) <= 1 << 18 and index.blocks <= 40
    blocks.receive(frame(sequence=2, events=[CacheEvent(stored=[HASHES[0]])]))
    assert index.match(ALL[:1])[blocks.slot] == 1


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


def test_many_small_events_are_applied_in_slices() -> None:
    index = PrefixIndex(1 << 14)
    blocks = ReplicaBlocks(index)
    blocks.receive(frame(snapshot=True, snapshot_end=True))
    events = [CacheEvent(stored=[number.to_bytes(16, "little")]) for number in range(1, MAX_EVENTS + 1)]
    assert len(list(blocks.slices(frame(sequence=2, events=events)))) > 20
    assert index.blocks == MAX_EVENTS
    with pytest.raises(MissedEventsError):
        blocks.receive(frame(sequence=3, events=[*events, CacheEvent()]))
    assert blocks.may_receive(frame(sequence=3, events=[*events, CacheEvent(cleared=True)])), "it is refused then"
    assert not blocks.complete


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


def test_many_clears_in_one_frame_are_one() -> None:
    index = PrefixIndex(1 << 14)
    blocks = ReplicaBlocks(index)
    blocks.receive(frame(snapshot=True, snapshot_end=True, events=[CacheEvent(stored=HASHES[:3])]))
    events = [CacheEvent(cleared=True, stored=[HASHES[5]]) for _ in range(1000)]
    blocks.receive(frame(sequence=2, events=[CacheEvent(stored=[HASHES[4]]), *events, CacheEvent(stored=[HASHES[6]])]))
    assert held(index, blocks) == {HASHES[5], HASHES[6]} and index.slots <= 3


def test_a_replica_that_clears_again_and_again_waits_for_the_sweep() -> None:
    """A flood of small frames: each slot that is swept costs all routers' requests a little."""
    index = PrefixIndex(1 << 14)
    blocks, other = ReplicaBlocks(index), ReplicaBlocks(index)
    other.receive(frame(snapshot=True, snapshot_end=True, events=[CacheEvent(stored=HASHES[:30])]))
    blocks.receive(frame(snapshot=True, snapshot_end=True, events=[CacheEvent(stored=HASHES[:3])]))
    sequence, waits = 1, 0
    for _ in range(200):
        cleared = frame(sequence=sequence + 1, events=[CacheEvent(cleared=True, stored=[HASHES[7]])])
        while not blocks.may_receive(cleared):
            assert blocks.may_receive(frame(sequence=sequence + 1, events=[CacheEvent(stored=[HASHES[8]])]))
            assert other.may_receive(cleared), "others do not wait for it"
            waits += 1
            index.sweep(100)
        sequence += 1
        blocks.receive(cleared)
    assert 20 <= waits <= 60 and index.slots <= 2 * MAX_CLEARED + 3
    assert held(index, blocks) == {HASHES[7]} and held(index, other) == set(HASHES[:30])


def test_an_index_without_place_is_noticed() -> None:
    index = PrefixIndex(1)
    blocks = ReplicaBlocks(index)
    many = np.random.default_rng(1).bytes(16 * 9000)
    hashes = [many[start : start + 16] for start in range(0, len(many), 16)]
    blocks.receive(frame(snapshot=True, snapshot_end=True, events=[CacheEvent(cleared=True, stored=hashes)]))
    assert blocks.full and blocks.complete and index.blocks > 5000
    blocks.receive(frame(snapshot=True, snapshot_end=True, events=[CacheEvent(cleared=True)]))
    assert not blocks.full
