"""Messages between the controller and a rank's actor: plain data, msgpack-encoded."""

from dataclasses import fields, replace
from hashlib import blake2b
from typing import Any

import msgspec

from headrace_cluster.spec.model_spec import ModelSpec
from headrace_proto.role import Role
from headrace_worker.core.config import Rendezvous, ReplicaConfig, ReplicaStarted
from headrace_worker.profiling.report import ProfileReport

NODE_HOST = "node"  # as ReplicaConfig.host: the address of this node in Ray
REPLICA_CLASS = "headrace_worker.replica:Replica"


class StartArgs(msgspec.Struct, frozen=True):
    """Sent to each rank once all ranks of its replica are placed."""

    rendezvous: Rendezvous | None = None  # of several ranks
    visible_gpus: tuple[str, ...] = ()
    gpu: int | None = None  # index among these


class StartOutcome(msgspec.Struct, frozen=True):
    """Result of a call: facts, or a sentence. Errors are sent as data: the receiver may not have their classes."""

    rendezvous: Rendezvous | None = None  # of `open_rendezvous`
    started: ReplicaStarted | None = None
    error: str = ""
    final: bool = False  # a retry would fail the same way
    secondary: bool = False  # another rank caused it
    lacks_resources: bool = False  # there is too little memory


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of a rank, for a controller that did not start it."""

    pid: int
    node: str
    gpus: list[str]  # assigned by Ray
    fingerprint: bytes
    secrets: tuple[bytes, ...]  # fingerprints of the values that it accepts; none: it has not received any
    model: str
    tp: int
    pp: int
    role: str
    role_number: int | None = None  # of the decision that gave it this role; none: it does not say
    started: ReplicaStarted | None  # none: `start` has not finished, or it failed
    draining: bool
    held: bool | None = None  # an operator drained it; false: it drains to be replaced; none: it does not say
    ended: bool  # its loop has ended, by itself or because it was stopped
    log_path: str = ""  # of its log file, in the folder of the run that started it


def fingerprint(config: ReplicaConfig) -> bytes:
    """16 bytes, equal for configs that describe the same replica.

    All fields count except the generation, the role (it may change at run time) and what is derived from the machine.
    """
    same = replace(config, generation=0, role=Role.BOTH, cpu_threads=None)
    return blake2b(msgspec.msgpack.encode(same), digest_size=16).digest()


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
