"""Which ranks of an earlier controller are adopted, and in which state. Pure.

rank reports       ──▶ choose_builds   ──▶ builds to adopt; every other rank and placement group is ended by name
ControllerSnapshot ──▶ restore_records ──▶ the records of a new reconciler, for adopted and for new builds
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace_cluster.core.driver import AdoptedBuild, AdoptedState, RankFacts
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import RankReport
from headrace_cluster.core.reconciler import Reconciler
from headrace_cluster.core.snapshot import ControllerSnapshot, ReplicaSnapshot
from headrace_proto.role import Role


@dataclass(frozen=True, slots=True)
class ExpectedBuild:
    """What a build must match to be adopted for a replica of the spec."""

    ranks: int
    fingerprint: bytes  # of its config


def choose_builds(
    reports: Mapping[tuple[ReplicaName, int], RankReport | None], expected: Mapping[str, ExpectedBuild]
) -> list[AdoptedBuild]:
    """For each expected replica, its newest build of which all ranks exist, are up and match.

    reports: of every rank that exists, by build and rank; None for a rank that did not reply.
    """
    found: dict[str, AdoptedBuild] = {}
    for name in sorted({name for name, _ in reports}):  # the newest last
        match = expected.get(name.replica_id)
        ranks = {rank: report for (build, rank), report in reports.items() if build == name}
        if match is None or ranks.keys() != set(range(match.ranks)):
            continue
        up = [report for _, report in sorted(ranks.items()) if report is not None and _matches(report, match)]
        if len(up) == match.ranks and (started := up[0].started) is not None:
            facts = [RankFacts(r, report.pid, report.node, _device(report)) for r, report in enumerate(up)]
            found[name.replica_id] = AdoptedBuild(name, facts, started, Role(up[0].role), up[0].draining)
    return list(found.values())


def restore_records(
    reconciler: Reconciler, snapshot: ControllerSnapshot | None, adopted_state: AdoptedState, now: float
) -> dict[ReplicaName, float]:
    """Restores a new reconciler to the state of the last one; returns the remaining seconds of drains, by build."""
    replicas = snapshot.replicas if snapshot is not None else {}
    drains: dict[ReplicaName, float] = {}
    for record in reconciler.records.values():
        known = replicas.get(record.replica_id)
        if known is not None:
            record.role, record.held, record.ever_ready = Role(known.role), known.held, known.ever_ready
            record.rolling = known.rolling
            record.generation = known.generation
            record.built = known.built
            if known.drain_seconds is not None:
                drains[record.name] = known.drain_seconds
        record.generation = max(record.generation, adopted_state.generations.get(record.replica_id, 0))
        record.built = max(record.built, record.generation)
    for build in adopted_state.builds:
        record = reconciler.records[build.name.replica_id]
        # The rank's report is newer than the snapshot: an operator's last call may have come after the last View.
        record.role, record.held = build.role, record.held or (build.draining and not record.rolling)
        reconciler.adopted(build.name, now)
        known = replicas.get(record.replica_id)
        surging = known is not None and known.surging and build.name.generation <= known.generation
        seen = adopted_state.generations.get(record.replica_id, 0)
        if surging or seen > build.name.generation:  # the last View may be older than the rollout
            reconciler.surges.mark_controller_lost(record)
    return drains


def take_snapshot(reconciler: Reconciler, created: int, drains: Mapping[ReplicaName, float]) -> ControllerSnapshot:
    """The inverse of `restore_records`. drains: their remaining seconds."""
    replicas = {
        record.replica_id: ReplicaSnapshot(
            generation=record.generation,
            built=record.built,
            role=str(record.role),
            held=record.held,
            rolling=record.rolling,
            surging=reconciler.surges.following(record) is not None,
            drain_seconds=drains.get(record.name),
            ever_ready=record.ever_ready,
        )
        for record in reconciler.records.values()
    }
    return ControllerSnapshot(created=created, replicas=replicas)


def _matches(report: RankReport, expected: ExpectedBuild) -> bool:
    return report.started is not None and not report.ended and report.fingerprint == expected.fingerprint


def _device(report: RankReport) -> str:
    return report.started.device if report.started is not None else ""
