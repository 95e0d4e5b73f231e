"""What `serve` sends to its controller's process, and what it reads from it: plain data."""

import msgspec

from headrace_cluster.core.rank_config import REPLICA_CLASS
from headrace_worker.core.config import ReplicaStarted

BUILT_AGAIN = "it is being built again"  # why a replica is down when an operator requested it and nothing failed


class ControllerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """For the controller of one `serve`, through a pipe. spec: JSON text, without keys of the API."""

    spec: str
    admin_key: str
    secret_file: str
    log_folder: str
    replica_class: str = REPLICA_CLASS


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """Where a controller listens, and what it found."""

    control_host: str
    control_port: int
    admin_port: int
    adopted: int = 0  # builds of an earlier controller that continue
    outdated: int = 0  # adopted builds with other settings than the spec's; they are replaced one after the other


class ReplicaProgress(msgspec.Struct, frozen=True):
    """Progress of one starting replica."""

    replica_id: str
    stage: str
    fraction: float


class RouterAddresses(msgspec.Struct, frozen=True):
    """Where a router that is connected to this controller listens."""

    id: str  # random for each start of the process: numbers of processes repeat, on other nodes and in containers
    pid: int
    http: str
    grpc: str
    metrics: str  # an address of this router alone: `http`, unless that port is shared


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a cluster, as the process that shows it needs it: the controller of a `serve` tells it by a pipe."""

    ready: bool
    fatal: str  # why the cluster cannot start at all
    stop_requested: bool
    progress: list[ReplicaProgress]
    started: dict[str, ReplicaStarted]
    roles: dict[str, str]  # by replica id
    routers: list[RouterAddresses]
    failures: dict[str, str]  # replicas that are down or unhealthy, and why
    unable: dict[str, str] = {}  # replicas that were never ready and cannot start, and why
    problems: list[str] = []  # what failed in the controller lately, and is repeated
    in_flight: int = 0  # requests that replicas run or queue
