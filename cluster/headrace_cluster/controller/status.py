"""Documents of the admin API: the status that `headrace status --json` prints, and the result of a profile."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from headrace_cluster.core.driver import RankFacts
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import ProfileOutcome
from headrace_cluster.core.record import Record, State
from headrace_cluster.core.view import BUILT_AGAIN
from headrace_proto import control_pb2, replica_pb2


def replica_status(
    record: Record,
    ranks: Iterable[RankFacts],
    health: replica_pb2.ReplicaHealth | None,
    note: str,
    beside: Sequence[dict[str, Any]] = (),
    roll_failed: str = "",
) -> dict[str, Any]:
    """One replica. `note` explains a state other than ready.

    connected: every router has a stream to it. beside: its builds that start or drain beside this one.
    roll_failed: why its last next build did not take over.
    """
    return {
        "id": record.replica_id,
        "model": record.model.name,
        "revision": health.identity.revision if health is not None else "",
        "role": str(record.role),
        "tp": record.model.tp,
        "pp": record.model.pp,
        "state": str(record.state),
        "load": _load(health),
        "ranks": [{"rank": r.rank, "pid": r.pid, "node": r.node, "device": r.device} for r in ranks],
        "generation": record.generation,
        "note": note,
        "connected": record.connected is not None,
        "beside": list(beside),
        "roll_failed": roll_failed,
    }


def build_status(record: Record, health: replica_pb2.ReplicaHealth | None, note: str) -> dict[str, Any]:
    """A build of a replica beside the current one."""
    return {"generation": record.generation, "state": str(record.state), "load": _load(health), "note": note}


def _load(health: replica_pb2.ReplicaHealth | None) -> dict[str, Any]:
    load = health.load if health is not None else replica_pb2.Load()
    usage = load.kv_usage if math.isfinite(load.kv_usage) else 0.0  # JSON has no other numbers
    return {"running": load.running, "waiting": load.waiting, "kv_usage": round(usage, 4)}


def down_reason(record: Record, note: str) -> str:
    """Why a replica that was up is down, else empty. `serve` prints it once, so it has no stages and no seconds."""
    if record.held:
        return note if record.state is State.DRAINED else "draining"
    if record.state in (State.READY, State.DRAINING) or not record.generation:
        return ""
    if record.state is not State.UNHEALTHY and not record.cause:
        return BUILT_AGAIN if record.ever_ready else ""
    return note


def router_status(
    router: control_pb2.RouterInfo, note: str, placements: Iterable[control_pb2.ModelPlacement]
) -> dict[str, Any]:
    """One router that watches the member list. note: if it receives from no replica.

    placement: by model, since the router's start; unknown_caches: why the KV blocks of a replica are not known, by id.
    """
    addresses = {"http": router.http, "grpc": router.grpc, "metrics": router.metrics}
    placement = [
        {
            "model": entry.model,
            "policy": entry.policy,
            "prompt_tokens": entry.prompt_tokens,
            "cached_tokens": entry.cached_tokens,
            "placements": entry.placements,
            "cache_placements": entry.cache_placements,
            "unknown_caches": dict(entry.unknown_caches),
        }
        for entry in placements
    ]
    return {"id": router.id, "pid": router.pid, **addresses, "note": note, "placement": placement}


def profile_document(
    name: ReplicaName, ranks: Iterable[RankFacts], outcomes: Iterable[ProfileOutcome]
) -> dict[str, Any]:
    """The path of each rank's trace, or why it has none; and the operators of rank 0 by time."""
    entries: list[dict[str, Any]] = []
    operators: list[dict[str, Any]] = []
    for rank, outcome in zip(ranks, outcomes, strict=True):
        entry: dict[str, Any] = {"rank": rank.rank, "node": rank.node}
        report = outcome.report
        if report is None:
            entries.append(entry | {"error": outcome.error})
            continue
        entry |= {"path": report.path, "steps": report.steps, "seconds": round(report.seconds, 3)}
        entries.append(entry | {"note": report.note})
        if rank.rank == 0:
            operators = [
                {
                    "name": operator.name,
                    "calls": operator.calls,
                    "milliseconds": round(operator.milliseconds, 3),
                    "share": round(operator.share, 4),
                    "on_device": operator.on_device,
                }
                for operator in report.operators
            ]
    return {"id": name.replica_id, "generation": name.generation, "traces": entries, "operators": operators}
