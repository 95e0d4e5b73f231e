"""What the controller and a rank's actor say to each other: plain data, msgpack-encoded."""

import msgspec

from headrace_worker.config import ReplicaStarted

NODE_HOST = "node"  # as ReplicaConfig.host: the address by which Ray knows this node
REPLICA_CLASS = "headrace_worker.replica:Replica"


class StartOutcome(msgspec.Struct, frozen=True):
    """How a start ended: facts, or a sentence. Errors cross as data: their classes need not exist on the other side."""

    started: ReplicaStarted | None = None
    error: str = ""
    final: bool = False  # the next try would end the same way
