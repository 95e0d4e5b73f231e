"""One replica's state in the router, frame by frame."""

import pytest

from headrace_proto.control_pb2 import Member
from headrace_proto.replica_pb2 import (
    REPLICA_STATE_READY,
    CacheFrame,
    CacheGroup,
    Counters,
    KvLayout,
    Load,
    ModelFacts,
    ReplicaFrame,
    ReplicaIdentity,
    Submit,
)
from headrace_proto.stall import LONGEST_STALL, STALL_SECONDS
from headrace_router.core.prefix_index import PrefixIndex
from headrace_router.core.replica_blocks import MissedEventsError, ReplicaBlocks
from headrace_router.core.replica_state import ReplicaState


def test_frames_without_a_step_are_no_heartbeat() -> None:
    now = 0.0
    member = Member(address="a", state=REPLICA_STATE_READY)
    replica: ReplicaState[None] = ReplicaState(member, clock=lambda: now, new_id=lambda: b"x", on_send=lambda: None)
    replica.describe(ModelFacts(identity=ReplicaIdentity(replica_id="r")), None)
    replica.receive(ReplicaFrame(hello=ReplicaIdentity(replica_id="r"), step=1))
    assert replica.ready
    now = STALL_SECONDS + 1
    assert not replica.receive(ReplicaFrame(step=1, load=Load(running=1)))
    assert replica.stalled and not replica.ready
    assert replica.receive(ReplicaFrame(step=2))
    assert replica.ready


def connected() -> ReplicaState[None]:
    ids = iter(range(100))
    replica: ReplicaState[None] = ReplicaState(
        Member(address="a", state=REPLICA_STATE_READY),
        clock=lambda: 0.0,
        new_id=lambda: bytes([next(ids)]),
        on_send=lambda: None,
    )
    replica.receive(ReplicaFrame(hello=ReplicaIdentity(replica_id="r"), step=1))
    return replica


def test_a_process_that_hangs_is_not_ready_when_it_connects_again() -> None:
    """Its server may answer although its step loop does not move."""
    now = 0.0
    member = Member(address="a", state=REPLICA_STATE_READY)
    replica: ReplicaState[None] = ReplicaState(member, clock=lambda: now, new_id=lambda: b"x", on_send=lambda: None)
    identity = ReplicaIdentity(replica_id="r", boot_id=b"first")
    replica.describe(ModelFacts(identity=identity), None)
    replica.receive(ReplicaFrame(hello=identity))
    replica.receive(ReplicaFrame(step=7))
    assert replica.ready
    now = STALL_SECONDS + 1
    replica.disconnect()
    replica.receive(ReplicaFrame(hello=identity))
    assert not replica.ready
    replica.receive(ReplicaFrame(step=7))
    assert replica.ready


def test_a_stream_that_was_opened_again_has_its_own_time_until_it_is_silent() -> None:
    """A replica that had been silent for long was disconnected at its first frame, again and again."""
    now = 0.0
    member = Member(address="a", state=REPLICA_STATE_READY)
    replica: ReplicaState[None] = ReplicaState(member, clock=lambda: now, new_id=lambda: b"x", on_send=lambda: None)
    hello = ReplicaFrame(hello=ReplicaIdentity(replica_id="r", boot_id=b"first"), step=7)
    assert not replica.silent(30.0), "nothing is connected"
    replica.receive(hello)
    now = 29.0
    assert not replica.silent(30.0)
    now = 31.0
    assert replica.silent(30.0)
    replica.disconnect()
    assert not replica.silent(30.0)
    replica.receive(hello)
    assert replica.stalled and not replica.silent(30.0)
    now += 31.0
    assert replica.silent(30.0)
    replica.heartbeat.extend(30.0)
    assert not replica.silent(30.0)
    replica.receive(ReplicaFrame(step=8))
    now += 29.0
    assert not replica.silent(30.0)


def test_a_submit_counts_until_the_replica_reports_it() -> None:
    """However many steps pass: it may wait in a connection."""
    replica = connected()
    attempts = [replica.submit(Submit(prompt_token_ids=[1] * 7), lambda *_: None, lambda _: None) for _ in range(4)]
    attempts[1].cancel()  # never sent
    replica.submit_queue.take()
    for step in range(2, 9):
        replica.receive(ReplicaFrame(step=step, submits=0))
    assert (replica.unreported, replica.queued_tokens) == (3, 21)
    replica.receive(ReplicaFrame(step=9, submits=1))
    assert replica.unreported == 2
    attempts[2].cancel()
    assert replica.unreported == 1
    replica.receive(ReplicaFrame(step=10, submits=2))
    assert replica.unreported == 1, "the cancelled one was sent before it"
    replica.receive(ReplicaFrame(step=11, submits=3))
    assert replica.unreported == 0


def test_submits_of_a_new_stream_are_counted_anew() -> None:
    replica = connected()
    replica.submit(Submit(), lambda *_: None, lambda _: None)
    replica.submit_queue.take()
    replica.receive(ReplicaFrame(step=2, submits=1))
    replica.disconnect()
    replica.receive(ReplicaFrame(hello=ReplicaIdentity(replica_id="r"), step=1))
    replica.submit(Submit(), lambda *_: None, lambda _: None)
    replica.submit_queue.take()
    replica.receive(ReplicaFrame(step=2, submits=0))
    assert replica.unreported == 1
    replica.receive(ReplicaFrame(step=3, submits=1))
    assert replica.unreported == 0


def test_a_slow_replica_cannot_raise_its_own_stall_time_without_bound() -> None:
    replica = connected()
    replica.receive(ReplicaFrame(step=2, load=Load(predicted_step_ms=60_000)))
    assert replica.stall_limit(STALL_SECONDS) == LONGEST_STALL
    replica.receive(ReplicaFrame(step=3, load=Load(predicted_step_ms=1000)))
    assert replica.stall_limit(STALL_SECONDS) == 4.0


def test_the_time_of_a_pause_between_two_rare_reports_is_no_measure() -> None:
    """Two requests of another router half a second apart: the steps between are not slow."""
    now = 0.0

    def complete(idle_steps: int) -> bool:
        nonlocal now
        member = Member(address="a", state=REPLICA_STATE_READY)
        replica: ReplicaState[None] = ReplicaState(member, clock=lambda: now, new_id=lambda: b"x", on_send=lambda: None)
        for step in (10, 12, 14):
            load = Load(running=1, predicted_step_ms=10, counters=Counters(idle_steps=idle_steps * step))
            replica.receive(ReplicaFrame(step=step, load=load))
            now += 0.6
        return replica.speed.complete

    assert complete(idle_steps=0) and not complete(idle_steps=1)


def test_a_replica_is_stalled_later_by_the_interval_of_its_reports() -> None:
    replica = connected()
    replica.report_seconds = 0.5
    assert replica.stall_limit(STALL_SECONDS) == STALL_SECONDS + 0.5


def test_why_the_blocks_of_a_replica_are_not_known() -> None:
    index = PrefixIndex(100)
    layout = KvLayout(version=1, block_size=16, groups=[CacheGroup()])
    member = Member(address="a", state=REPLICA_STATE_READY)
    followed: ReplicaState[None] = ReplicaState(
        member, clock=lambda: 0.0, new_id=lambda: b"x", on_send=lambda: None, blocks=ReplicaBlocks(index)
    )
    assert connected().unknown_cache == "the policy does not look for them"
    followed.describe(ModelFacts(identity=ReplicaIdentity(replica_id="r")), None)
    assert followed.unknown_cache == "the replica keeps no prefixes"
    facts = ModelFacts(
        identity=ReplicaIdentity(replica_id="r", kv_layout=layout), cache_key=bytes(32), max_model_len=99
    )
    followed.describe(facts, None)
    assert followed.unknown_cache == "its events are missing"
    assert followed.blocks is not None
    followed.blocks.receive(CacheFrame(boot_id=b"b", sequence=1, snapshot=True, snapshot_end=True))
    assert followed.unknown_cache == ""
    with pytest.raises(MissedEventsError):
        followed.blocks.receive(CacheFrame(boot_id=b"b", sequence=3))
    assert followed.unknown_cache == "its events are missing", "after a gap"
    followed.blocks.full = followed.blocks.complete = True
    assert followed.unknown_cache == "this router's index is full"
