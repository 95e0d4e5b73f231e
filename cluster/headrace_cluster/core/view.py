"""Messages between the controller actor and the process that started it: plain data, msgpack-encoded."""

import msgspec

from headrace_cluster.core.rank_config import REPLICA_CLASS
from headrace_worker.core.config import ReplicaStarted

UNWATCHED_SECONDS = 5.0  # without a poll, until a controller has no keeper; one that is to stop then stops by itself
BUILT_AGAIN = "it is being built again"  # why a replica is down when an operator requested it and nothing failed


class ControllerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """All that a controller needs, without secrets: Ray keeps the arguments of actors. The spec is JSON text."""

    spec: str
    program: str  # the command in hints: this process was not called by its name
    loopback: bool  # all processes are on this machine: bind loopback only
    replica_class: str = REPLICA_CLASS
    log_folder: str = ""  # empty: this process and the ranks log to stderr only


class ControllerSecrets(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller needs besides; sealed for its process (`headrace_proto.identity.seal`)."""

    secrets: tuple[bytes, ...]  # of the cluster, the one that signs first
    admin_key: str


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """Where a controller listens, or why it does not."""

    control_host: str = ""
    control_port: int = 0
    admin_port: int = 0
    pid: int = 0
    adopted: int = 0  # builds of an earlier controller that continue
    outdated: int = 0  # of these: with other settings than the spec's; they are replaced one after the other
    error: str = ""


class ReplicaProgress(msgspec.Struct, frozen=True):
    """Progress of one starting replica."""

    replica_id: str
    stage: str
    fraction: float


class RouterPlace(msgspec.Struct, frozen=True):
    """Where a router that is connected to this controller listens."""

    id: str  # random for each start of the process: numbers of processes repeat, on other nodes and in containers
    pid: int
    http: str
    grpc: str
    metrics: str  # an address of this router alone: `http`, unless that port is shared


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What `serve` polls, several times a second."""

    ready: bool
    fatal: str  # why the cluster cannot start at all
    stop_requested: bool
    progress: list[ReplicaProgress]
    started: dict[str, ReplicaStarted]
    roles: dict[str, str]  # by replica id
    routers: list[RouterPlace]
    failures: dict[str, str]  # replicas that are down or unhealthy, and why
    unable: dict[str, str] = {}  # replicas that were never ready and cannot start, and why
    problems: list[str] = []  # what failed in the controller lately, and is repeated
    in_flight: int = 0  # requests that replicas run or queue
