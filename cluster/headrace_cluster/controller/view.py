"""What the controller actor and the process that started it say to each other: plain data, msgpack-encoded."""

import msgspec

from headrace_cluster.controller.memory import ControllerMemory
from headrace_cluster.rank_config import REPLICA_CLASS
from headrace_worker.config import ReplicaStarted


class ControllerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """All that a controller needs; as JSON text for the spec, which is a pydantic model."""

    spec: str
    secret: bytes
    admin_key: str
    loopback: bool  # everything is on this machine: bind loopback only
    replica_class: str = REPLICA_CLASS
    memory: ControllerMemory | None = None  # of the controller before this one
    environment: dict[str, str] = {}


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """Where a controller listens; or why it does not."""

    control_host: str = ""
    control_port: int = 0
    admin_port: int = 0
    pid: int = 0
    error: str = ""


class ReplicaProgress(msgspec.Struct, frozen=True):
    """How far one starting replica is."""

    replica_id: str
    stage: str
    fraction: float


class RouterPlace(msgspec.Struct, frozen=True):
    """Where a router that knows this controller listens."""

    pid: int
    http: str
    grpc: str
    metrics: str  # where this router alone answers: `http`, unless that is shared


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What `serve` looks at, some times a second."""

    ready: bool
    fatal: str
    stop_requested: bool
    replicas: int
    progress: list[ReplicaProgress]
    started: dict[str, ReplicaStarted]
    roles: dict[str, str]  # by replica id
    routers: list[RouterPlace]
    memory: ControllerMemory  # for the controller that may have to follow this one
    failures: dict[str, str]  # replicas that are down or unwell, and why
