"""What a controller shows: the document of `headrace status --json`, the view of `serve`, the result of a profile."""

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from headrace_cluster.controller.control_loop import ControlLoop
from headrace_cluster.controller.members import Membership
from headrace_cluster.core.planner import Planner
from headrace_cluster.core.rank_config import ProfileOutcome, Stage
from headrace_cluster.core.replica_build import Build, State
from headrace_cluster.core.view import BUILT_AGAIN, ClusterView, ReplicaProgress, RouterAddresses
from headrace_cluster.core.wanted import differences
from headrace_cluster.core.words import Words
from headrace_cluster.program import program_name
from headrace_proto import control_pb2, replica_pb2

OUTDATED = "it is built again in turn"


def status_document(loop: ControlLoop, membership: Membership) -> dict[str, Any]:
    """The document that `headrace status --json` prints. overrides: what operators changed in the spec's models."""
    now, planner = loop.clock(), loop.planner
    unreached = membership.unreached
    return {
        "replicas": [_replica(loop, name, now) for name in _replica_ids(planner)],
        "routers": [
            router_status(router, unreached.get(router.id, ""), membership.placements(router.id))
            for router in sorted(membership.routers.values(), key=lambda router: router.metrics)
        ],
        "overrides": differences(loop.spec.models, loop.effective.models),
        "problems": [
            *(build.foreign for build in planner.builds.values() if build.foreign),
            *loop.unused_words,
            *_lost_record(loop.words),
            *loop.retries.problems,
            *unreached.values(),
        ],
    }


def _lost_record(words: Words) -> list[str]:
    if not words.lost:
        return []
    found, program = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(words.lost)), program_name()
    return [
        f"the cluster's record in Ray's GCS was lost (found at {found}): what operators changed before (drained "
        "replicas, roles, numbers of replicas, applied models, settings) does not count any more, the spec alone does; "
        f"repeat what is to count with `{program} drain`, `role`, `scale`, `apply` or `rollout --set`"
    ]


def view(loop: ControlLoop, membership: Membership, *, stop_requested: bool) -> ClusterView:
    """For the process that shows the cluster."""
    planner, now = loop.planner, loop.clock()
    current = {name: planner.current(name) for name in _replica_ids(planner)}
    return ClusterView(
        ready=planner.ready,
        fatal=planner.fatal,
        unable=dict(planner.unable),
        problems=status_document(loop, membership)["problems"],
        stop_requested=stop_requested,
        progress=[_progress(build) for build in current.values() if build is not None and _starts(build)],
        started={build.replica_id: build.started for build in current.values() if build is not None and build.started},
        roles={name: str(build.role if build else planner.wanted[name].role) for name, build in current.items()},
        routers=[RouterAddresses(r.id, r.pid, r.http, r.grpc, r.metrics) for r in membership.routers.values()],
        failures={name: why for name in planner.wanted if (why := _down_reason(planner, name, now))},
        in_flight=in_flight(loop),
    )


def in_flight(loop: ControlLoop) -> int:
    """Requests that replicas run or queue, builds that drain beside their next one included."""
    return sum(build.requests for build in loop.planner.builds.values() if build.state is not State.DEAD)


def _replica_ids(planner: Planner) -> list[str]:
    """Those that are wanted, then others that still have a build."""
    others = sorted({build.replica_id for build in planner.builds.values()} - planner.wanted.keys())
    return [*planner.wanted, *others]


def _replica(loop: ControlLoop, name: str, now: float) -> dict[str, Any]:
    """One replica. note: explains a state other than ready.

    connected: every router has a stream to it. beside: its builds that start or drain beside this one. roll_failed: why
    its last next build did not take over. unable: why it has never started. wanted: the spec names it. outdated: its
    build is not as the spec describes it.
    """
    planner = loop.planner
    wanted, build, slot = planner.wanted.get(name), planner.current(name), planner.slots.get(name)
    model = wanted.model if wanted is not None else None
    health = loop.health.get(build.name) if build is not None else None
    reports = build.reports if build is not None else {}
    return {
        "id": name,
        "model": build.model if build is not None else model.name if model is not None else "",
        "revision": health.identity.revision if health is not None else "",
        "role": str(build.role if build is not None else wanted.role if wanted is not None else ""),
        "tp": build.tp if build is not None else model.tp if model is not None else 1,
        "pp": build.pp if build is not None else model.pp if model is not None else 1,
        "state": str(replica_state(planner, name)),
        "load": _load(health),
        "ranks": [
            {"rank": rank, "pid": report.pid, "node": report.node, "device": _device(build, rank)}
            for rank, report in sorted(reports.items())
        ],
        "generation": build.name.generation if build is not None else loop.words.generations.get(name, 0),
        "note": _note(planner, name, now),
        "transfers": _transfers(planner, health),
        "connected": build is not None and build.connected is not None,
        "beside": [
            {
                "generation": other.name.generation,
                "state": str(other.state),
                "load": _load(loop.health.get(other.name)),
                "note": other.cause or _progress(other).stage,
            }
            for other in planner.builds_of(name)
            if other is not build
        ],
        "roll_failed": slot.refusal
        if slot is not None and wanted is not None and slot.refused == wanted.digest
        else "",
        "unable": planner.unable.get(name, ""),
        "wanted": wanted is not None,
        "outdated": wanted is None or (build is not None and build.digest != wanted.digest),
    }


def replica_state(planner: Planner, name: str) -> State:
    """As `headrace status` prints it."""
    build = planner.current(name)
    if build is not None:
        return build.state
    return State.DRAINED if name in planner.wanted and planner.wanted[name].drained else State.DEAD


def _note(planner: Planner, name: str, now: float) -> str:
    wanted, build, slot = planner.wanted.get(name), planner.current(name), planner.slots.get(name)
    if wanted is not None and wanted.drained and build is None:
        return f"drained; `{program_name()} undrain {name}` brings it back"
    if build is not None and build.leave_until is not None:
        if wanted is not None and not wanted.drained:
            return "draining: it is built again next"
        left = build.leave_until - now
        serves = build.state is State.DRAINING and left > 0
        return f"draining: what still runs in {left:.0f} s moves" if serves else "draining: it is being stopped"
    if slot is not None and (loop := slot.crash_loop(now)):
        return loop
    if build is None or build.state is State.DEAD:
        return (build.cause if build is not None else "") or (slot.cause if slot is not None else "")
    if build.state is State.READY and build.node_ends_at is not None:
        return (
            f"its node is drained, and ends in {max(0.0, build.node_ends_at - now):.0f} s: it is built again elsewhere"
        )
    if build.state is State.READY:
        outdated = wanted is not None and build.digest != wanted.digest
        waits = f"; it waits: {slot.waits}" if slot is not None and slot.waits else ""
        return build.cause or (f"{OUTDATED}{waits}" if outdated else "")
    return build.cause or _progress(build).stage or (slot.cause if slot is not None else "")


def _down_reason(planner: Planner, name: str, now: float) -> str:
    """Why a replica that was up is down, else empty. `serve` prints it once, so it has no stages and no seconds."""
    wanted, build, slot = planner.wanted[name], planner.current(name), planner.slots.get(name)
    if wanted.drained:
        return _note(planner, name, now) if build is None else "draining"
    if build is not None and build.state in (State.READY, State.DRAINING):
        return ""
    if build is not None and build.state is State.UNHEALTHY:
        return build.cause
    if slot is None:
        return ""
    return slot.crash_loop(now) or slot.cause or (BUILT_AGAIN if slot.served else "")


def _starts(build: Build) -> bool:
    return build.state in (State.PENDING, State.STARTING)


def _progress(build: Build) -> ReplicaProgress:
    """The progress of the slowest rank of a build."""
    starting = [report for report in build.reports.values() if report.stage is Stage.STARTING]
    if build.state is State.PENDING or not starting:
        stage = "placing it" if build.state is State.PENDING else "waiting for its processes"
        return ReplicaProgress(build.replica_id, build.cause or (stage if _starts(build) else ""), 0.0)
    slowest = min(starting, key=lambda report: report.fraction)
    return ReplicaProgress(build.replica_id, slowest.progress, slowest.fraction)


def _device(build: Build | None, rank: int) -> str:
    started = build.reports[rank].started if build is not None else None
    return started.device if started is not None else ""


def _load(health: replica_pb2.ReplicaHealth | None) -> dict[str, Any]:
    load = health.load if health is not None else replica_pb2.Load()
    usage = load.kv_usage if math.isfinite(load.kv_usage) else 0.0  # JSON has no other numbers
    return {"running": load.running, "waiting": load.waiting, "kv_usage": round(usage, 4)}


def _transfers(planner: Planner, health: replica_pb2.ReplicaHealth | None) -> list[dict[str, Any]]:
    """From which replicas this one has read KV blocks lately, and how fast."""
    names = {build.started.address: build.replica_id for build in planner.builds.values() if build.started is not None}
    return [
        {
            "from": names.get(source.address, source.address),
            "gb_per_second": round(source.bytes_per_second / 1e9, 3),
            "seconds_per_1000_tokens": round(source.per_token_ms, 6),
        }
        for source in (health.load.sources if health is not None else ())
    ]


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


def profile_document(build: Build, outcomes: Sequence[ProfileOutcome]) -> dict[str, Any]:
    """The path of each rank's trace, or why it has none; and the operators of rank 0 by time."""
    entries: list[dict[str, Any]] = []
    operators: list[dict[str, Any]] = []
    for rank, outcome in enumerate(outcomes):
        entry: dict[str, Any] = {"rank": rank, "node": build.reports[rank].node if rank in build.reports else ""}
        report = outcome.report
        if report is None:
            entries.append(entry | {"error": outcome.error})
            continue
        entry |= {"path": report.path, "steps": report.steps, "seconds": round(report.seconds, 3)}
        entries.append(entry | {"note": report.note})
        if rank == 0:
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
    return {"id": build.replica_id, "generation": build.name.generation, "traces": entries, "operators": operators}
