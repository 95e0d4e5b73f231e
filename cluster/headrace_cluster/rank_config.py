"""What the controller and a rank's actor say to each other: plain data, msgpack-encoded."""

import msgspec

from headrace_worker.config import Meeting, ReplicaStarted
from headrace_worker.profiling import ProfileReport

NODE_HOST = "node"  # as ReplicaConfig.host: the address by which Ray knows this node
REPLICA_CLASS = "headrace_worker.replica:Replica"


class StartOrder(msgspec.Struct, frozen=True):
    """What a rank learns when all ranks of its replica have a place."""

    meeting: Meeting | None = None  # of several ranks
    visible_gpus: tuple[str, ...] = ()
    gpu: int | None = None  # index among these


class StartOutcome(msgspec.Struct, frozen=True):
    """What came of a call: facts, or a sentence. Errors cross as data: their classes may be missing there."""

    meeting: Meeting | None = None  # of `open_meeting`
    started: ReplicaStarted | None = None
    error: str = ""
    final: bool = False  # the next try would end the same way
    secondary: bool = False  # another rank is to blame


class ProfileOutcome(msgspec.Struct, frozen=True):
    """What came of a profile of one rank: a report, or a sentence."""

    report: ProfileReport | None = None
    error: str = ""
