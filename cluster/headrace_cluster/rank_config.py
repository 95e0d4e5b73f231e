"""What the controller and a rank's actor say to each other: plain data, msgpack-encoded."""

from hashlib import blake2b

import msgspec

from headrace_worker.config import Meeting, ReplicaConfig, ReplicaStarted
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


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says to a controller that did not start it."""

    pid: int
    node: str
    gpus: list[str]  # that Ray keeps for it
    fingerprint: bytes
    role: str
    started: ReplicaStarted | None  # none: `start` is not done, or it failed
    draining: bool
    ended: bool  # its loop, by itself or because it was stopped


def fingerprint(config: ReplicaConfig) -> bytes:
    """16 bytes, the same for configs of which one can stand for the other.

    All counts but the number of the build, what may change while it runs, and what is derived from the machine.
    """
    same = msgspec.structs.replace(config, generation=0, role="both", cpu_threads=None)
    return blake2b(msgspec.msgpack.encode(same), digest_size=16).digest()


class ProfileOutcome(msgspec.Struct, frozen=True):
    """What came of a profile of one rank: a report, or a sentence."""

    report: ProfileReport | None = None
    error: str = ""
