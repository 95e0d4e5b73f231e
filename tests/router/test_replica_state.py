"""One replica's state in the router, frame by frame."""

from headrace_proto.control_pb2 import Member
from headrace_proto.replica_pb2 import (
    REPLICA_STATE_READY,
    Load,
    ModelFacts,
    ReplicaFrame,
    ReplicaIdentity,
    Submit,
)
from headrace_proto.stall import LONGEST_STALL, STALL_SECONDS
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


def test_a_slow_replica_cannot_raise_its_own_stall_time_without_bound() -> None:
    replica = connected()
    replica.receive(ReplicaFrame(step=2, load=Load(predicted_step_ms=60_000)))
    assert replica.stall_limit(STALL_SECONDS) == LONGEST_STALL
    replica.receive(ReplicaFrame(step=3, load=Load(predicted_step_ms=1000)))
    assert replica.stall_limit(STALL_SECONDS) == 4.0
