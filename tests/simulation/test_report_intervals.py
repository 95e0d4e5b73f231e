"""A replica's pacer with a router's stall detection: rare reports are no stall, and a stall is found."""

from random import Random

import pytest

from headrace_proto.control_pb2 import Member
from headrace_proto.replica_pb2 import Load, ReplicaFrame, ReplicaIdentity
from headrace_proto.stall import stall_limit
from headrace_router.core.replica_state import ReplicaState
from headrace_router.replicas.replica_link import LONGEST_REPORT_MS
from headrace_worker.core.load_reports import ReportPacer, ReportState


@pytest.mark.parametrize("seed", range(20))
def test_a_replica_whose_steps_are_explained_is_never_stalled(seed: int) -> None:
    """Steps of up to the time after which a router without intervals would regard the replica as stalled."""
    random = Random(seed)
    now = 0.0
    interval = random.choice([0.02, 0.1, 0.5, LONGEST_REPORT_MS / 1e3])
    member = Member(identity=ReplicaIdentity(replica_id="r"), address="a")
    replica: ReplicaState[str] = ReplicaState(member, clock=lambda: now, new_id=lambda: b"", on_send=lambda: None)
    replica.report_seconds = interval
    replica.receive(ReplicaFrame(hello=ReplicaIdentity(replica_id="r")))
    pacer, frames = ReportPacer(interval), 0
    for step in range(1, 400):
        predicted = random.choice([0.005, 0.01, 0.05, 0.3, 0.6, 1.5])
        state = ReportState(predicted, random.randrange(2))
        if pacer.due(state, now):
            pacer.sent(state, now)
            replica.receive(ReplicaFrame(step=step, load=Load(predicted_step_ms=predicted * 1e3)))
            frames += 1
        longest = 0.999 * stall_limit(predicted)
        now += longest if random.random() < 0.1 else min(predicted * random.uniform(0.5, 1.5), longest)
        assert not replica.stalled, (step, predicted)
    assert frames > 0
    now += stall_limit(2.0) + interval + 0.001
    assert replica.stalled
