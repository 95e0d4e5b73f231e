"""Documents of the admin API: the status that `headrace status --json` prints, and what a profile brought."""

from collections.abc import Iterable
from typing import Any

from headrace_cluster.controller.driver import RankFacts
from headrace_cluster.controller.reconciler import Record, State
from headrace_cluster.naming import ReplicaName
from headrace_cluster.rank_config import ProfileOutcome
from headrace_proto import control_pb2, replica_pb2


def replica_status(
    record: Record,
    ranks: Iterable[RankFacts],
    health: replica_pb2.ReplicaHealth | None,
    note: str,
) -> dict[str, Any]:
    """One replica. `note` says what is going on when it is not plainly ready."""
    load = health.load if health is not None else replica_pb2.Load()
    return {
        "id": record.replica_id,
        "model": record.model.name,
        "revision": health.identity.revision if health is not None else "",
        "role": str(record.role),
        "tp": record.model.tp,
        "pp": record.model.pp,
        "state": str(record.state),
        "load": {"running": load.running, "waiting": load.waiting, "kv_usage": round(load.kv_usage, 4)},
        "ranks": [{"rank": r.rank, "pid": r.pid, "node": r.node, "device": r.device} for r in ranks],
        "generation": record.generation,
        "note": note,
    }


def trouble(record: Record, note: str) -> str:
    """Why a replica that was up is not: what `serve` says once, hence without stages and seconds. Else empty."""
    if record.held:
        return note if record.state is State.DRAINED else "draining"
    if record.state in (State.READY, State.DRAINING) or not record.generation:
        return ""
    if record.state is not State.UNHEALTHY and not record.cause:
        return "it is built again" if record.ever_ready else ""
    return note


def router_status(router: control_pb2.RouterInfo) -> dict[str, Any]:
    """One router that watches the member list."""
    return {"id": router.id, "pid": router.pid, "http": router.http, "grpc": router.grpc, "metrics": router.metrics}


def profile_document(
    name: ReplicaName, ranks: Iterable[RankFacts], outcomes: Iterable[ProfileOutcome]
) -> dict[str, Any]:
    """Where each rank's trace lies, or why it has none; and which operators took rank 0's time."""
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
