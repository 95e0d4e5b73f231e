"""One replica's state in the router, frame by frame."""

from headrace_proto.control_pb2 import Member
from headrace_proto.replica_pb2 import REPLICA_STATE_READY, Load, ModelFacts, ReplicaFrame, ReplicaIdentity
from headrace_proto.stall import STALL_SECONDS
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
