"""The status document: what `headrace status --json` prints."""

from collections.abc import Iterable
from typing import Any

from headrace_cluster.controller.driver import RankFacts
from headrace_cluster.controller.reconciler import Record
from headrace_proto import control_pb2, replica_pb2


def replica_status(
    record: Record,
    ranks: Iterable[RankFacts],
    health: replica_pb2.ReplicaHealth | None,
    role: str,
    note: str,
) -> dict[str, Any]:
    """One replica. `note` says what is going on when it is not plainly ready."""
    load = health.load if health is not None else replica_pb2.Load()
    return {
        "id": record.replica_id,
        "model": record.model.name,
        "revision": health.identity.revision if health is not None else "",
        "role": role,
        "state": str(record.state),
        "load": {"running": load.running, "waiting": load.waiting, "kv_usage": round(load.kv_usage, 4)},
        "ranks": [{"rank": r.rank, "pid": r.pid, "node": r.node, "device": r.device} for r in ranks],
        "generation": record.generation,
        "note": note,
    }


def router_status(router: control_pb2.RouterInfo) -> dict[str, Any]:
    """One router that watches the member list."""
    return {"id": router.id, "pid": router.pid, "http": router.http, "grpc": router.grpc, "metrics": router.metrics}
