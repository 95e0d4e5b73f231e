"""Messages between the controller and a rank's actor: plain data, msgpack-encoded."""

from collections.abc import Sequence
from dataclasses import fields, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Any

import msgspec

from headrace_cluster.spec.model_spec import ModelSpec
from headrace_proto.role import Role
from headrace_worker.core.config import Rendezvous, ReplicaConfig, ReplicaStarted
from headrace_worker.profiling.report import ProfileReport

NODE_HOST = "node"  # as ReplicaConfig.host: the address of this node in Ray
REPLICA_CLASS = "headrace_worker.replica:Replica"


class Stage(StrEnum):
    """How far a rank is."""

    WAITING = "waiting"  # for the cluster's secret
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"  # it did not become ready
    ENDED = "ended"  # its loop has ended, by itself or because it was stopped


UP = (Stage.READY, Stage.DRAINING)
ENDED = (Stage.FAILED, Stage.ENDED)


class Binding(msgspec.Struct, frozen=True):
    """What rank 0 of a replica tells each rank before it starts, once all of them exist."""

    rendezvous: Rendezvous | None = None  # set for a replica of several ranks
    visible_gpus: tuple[str, ...] = ()
    gpu: int | None = None  # index among these


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of itself to any controller."""

    version: int = 0  # one more with each change
    stage: Stage = Stage.WAITING
    pid: int
    node: str
    gpus: list[str]  # assigned by Ray
    digest: bytes  # digest of what the rank was built for
    secrets: tuple[bytes, ...]  # fingerprints of the values that it accepts; none: it has not received any
    model: str
    tp: int
    pp: int
    role: str
    started: ReplicaStarted | None = None  # once it was ready
    drain_seconds: float = 0.0  # left for requests in flight, while it drains
    progress: str = ""  # phase of the start, in words
    fraction: float = 0.0  # fraction of that phase that is done, 0..1
    error: str = ""  # why it failed or ended, in a sentence
    final: bool = False  # another start would fail the same way
    secondary: bool = False  # another rank caused it
    lacks_resources: bool = False  # there is too little memory
    log_path: str = ""  # path of the rank's log file, in the folder of the run that started the rank


def bind_gpus(places: Sequence[tuple[str, Sequence[str]]]) -> list[Binding]:
    """places: (node, GPUs assigned by Ray) of every rank of a replica, in rank order. Without its rendezvous.

    On one node, all GPUs of a replica are visible to all of its ranks: NCCL only copies between GPUs that are visible
    to both sides.
    """
    on_node: dict[str, list[str]] = {}
    for node, gpus in places:
        on_node.setdefault(node, []).extend(gpus)
    return [
        Binding(visible_gpus=tuple(on_node[node]), gpu=on_node[node].index(gpus[0])) if gpus else Binding()
        for node, gpus in places
    ]


def config_digest(config: ReplicaConfig, roll: int, version: str = "") -> bytes:
    """16 bytes, equal for configs that describe the same replica, in the same version of Headrace.

    All fields count except the generation, the role (it may change at run time) and what is derived from the machine.
    roll: the number of the replica's last roll. version: of the package.
    """
    same = replace(config, generation=0, role=Role.BOTH, cpu_threads=None)
    return blake2b(msgspec.msgpack.encode((version, roll, same)), digest_size=16).digest()


def replica_config(model: ModelSpec, **own: Any) -> ReplicaConfig:
    """A replica of `model`: every setting that both name alike; then what is `own`."""
    shared = ModelSpec.model_fields.keys() & {field.name for field in fields(ReplicaConfig)}
    values = {name: getattr(model, name) for name in shared} | {"model": model.name}
    values["defaults"] = model.defaults.model_dump(exclude_none=True)
    return ReplicaConfig(**values | own)


class ProfileOutcome(msgspec.Struct, frozen=True):
    """Result of a profile of one rank: a report, or a sentence."""

    report: ProfileReport | None = None
    error: str = ""
