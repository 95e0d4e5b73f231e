"""Which ranks of an earlier controller are adopted, and in which state. Pure.

rank reports, groups ─▶ plan_adoption   ─▶ builds to adopt; every other rank and placement group is ended by name
ControllerSnapshot   ─▶ restore_records ─▶ the records of a new reconciler, for adopted and for new builds
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace_cluster.core.driver import AdoptedBuild, AdoptedState, RankFacts
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import RankReport
from headrace_cluster.core.reconciler import Reconciler
from headrace_cluster.core.record import Record
from headrace_cluster.core.snapshot import ControllerSnapshot, ReplicaSnapshot
from headrace_cluster.errors import AdoptionError
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_proto.quantities import counted
from headrace_proto.role import Role

Reports = Mapping[tuple[ReplicaName, int], RankReport | None]


@dataclass(frozen=True, slots=True)
class AdoptionPlan:
    """What is taken over, and what is ended by name."""

    state: AdoptedState
    ended_ranks: list[tuple[ReplicaName, int]]
    ended_groups: list[ReplicaName]
    waits: str = ""  # why this is not all: the caller does this, then fails, and the next try goes on


def plan_adoption(
    reports: Reports,
    groups: Collection[ReplicaName],
    expected: Mapping[str, bytes],
    authorities: Collection[bytes],
    most_silent: int,
) -> AdoptionPlan:
    """Adopts the builds that are up and ends the rest. groups: builds with a placement group; others: `choose_builds`.

    most_silent: builds that a try ends because a rank did not reply. Of more than that it ends so many and adopts
    nothing yet: the next try finds whether the others still do not reply. Raises AdoptionError.
    """
    # Ray ends ranks without a placement group.
    placed = {rank: report for rank, report in reports.items() if rank[0] in groups}
    builds = choose_builds(placed, expected, authorities)
    silent = sorted({name for (name, _), report in reports.items() if report is None})
    if len(silent) > most_silent:
        ended = silent[:most_silent]
        return AdoptionPlan(
            AdoptedState(),
            [rank for rank in reports if rank[0] in ended],
            [name for name in ended if name in groups],
            f"{counted(len(silent), 'replica')} do not reply: {most_silent} are ended, then the others are asked again",
        )
    kept = {build.name for build in builds}
    found = sorted({name for name, _ in reports} | set(groups))
    return AdoptionPlan(
        AdoptedState(builds, {name.replica_id: name.generation for name in found}),
        [rank for rank in reports if rank[0] not in kept],
        [name for name in sorted(groups) if name not in kept],
    )


def choose_builds(
    reports: Reports, expected: Mapping[str, bytes], authorities: Collection[bytes]
) -> list[AdoptedBuild]:
    """Of each replica, the newest build of which all ranks exist and are up, and the one before if that is up, too.

    reports: of every rank that has not ended, by build and rank; None for one that did not reply. expected: the
    fingerprint of each replica of the spec. authorities: the fingerprints that this controller has. Raises
    AdoptionError when what serves would be ended by mistake.
    """
    _check_silence(reports)
    found: dict[str, list[AdoptedBuild]] = {}
    for name in sorted({name for name, _ in reports}):  # the newest last
        ranks = {rank: report for (build, rank), report in reports.items() if build == name}
        up = [report for _, report in sorted(ranks.items()) if report is not None and _is_up(report)]
        if not up or ranks.keys() != set(range(up[0].tp * up[0].pp)) or len(up) != len(ranks):
            continue
        started = up[0].started
        assert started is not None
        if not set(up[0].authorities) & set(authorities):
            raise AdoptionError(
                f"{name.replica_id} runs in this Ray with another secret: pass its file with --secret-file"
            )
        facts = [RankFacts(r, report.pid, report.node, _device(report)) for r, report in enumerate(up)]
        same = all(report.fingerprint == expected.get(name.replica_id) for report in up)
        if up[0].role not in set(Role):
            raise AdoptionError(f"{name.replica_id} has a role of another version of Headrace: {up[0].role[:40]!r}")
        build = AdoptedBuild(
            name, facts, started, Role(up[0].role), up[0].draining, up[0].held, up[0].model, up[0].tp, up[0].pp, same
        )
        found.setdefault(name.replica_id, []).append(build)
    return [build for builds in found.values() for build in _continuing(builds)]


def _continuing(builds: Sequence[AdoptedBuild]) -> Sequence[AdoptedBuild]:
    """The last two, the current one first. While both serve, routers may not be connected to the newest one yet.

    If one of them drains, the newest one has taken over, and the older one may still have requests; unless an operator
    drained the older one before that.
    """
    *older, newest = builds[-2:]
    if any(build.held for build in older):
        return older
    if any(build.draining for build in builds[-2:]):
        return [newest, *(replace(build, leaving=True) for build in older)]
    return [*older, newest]


def _check_silence(reports: Reports) -> None:
    """One rank that does not reply has failed. When many do not, this controller may be cut off."""
    silent = [rank for rank, report in reports.items() if report is None]
    if len(silent) > 1 and 2 * len(silent) >= len(reports):
        raise AdoptionError(
            f"{len(silent)} of {counted(len(reports), 'rank')} do not reply; nothing is ended, and they are asked again"
        )


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
    adopted: set[str] = set()
    for build in adopted_state.builds:
        replica_id = build.name.replica_id
        known = replicas.get(replica_id)
        if build.leaving:
            reconciler.surges.restore_leaving(reconciler.records[replica_id], build.name.generation, now)
            if known is not None and known.leaving_seconds is not None and build.name.generation < known.generation:
                drains[build.name] = known.leaving_seconds
        elif replica_id in adopted:  # the next build, beside it
            following = reconciler.adopted_beside(build.name, now)
            following.outdated = not build.same
            reconciler.surges.failed.pop(replica_id, None)
        else:
            adopted.add(replica_id)
            _restore_current(reconciler, known, build, adopted_state.generations.get(replica_id, 0), now)
    return drains


def _restore_current(
    reconciler: Reconciler, known: ReplicaSnapshot | None, build: AdoptedBuild, seen: int, now: float
) -> None:
    """known: of the snapshot. seen: the newest generation in Ray."""
    record = reconciler.records.get(build.name.replica_id) or _undesired(reconciler, build)
    record.outdated = not build.same
    if known is not None and known.generation < build.name.generation:
        record.held = record.rolling = False  # they were of an earlier build
    # The rank's report is newer than the snapshot: an operator's last call may have come after it.
    record.role = build.role
    if build.draining and not (record.held or record.rolling):
        record.rolling = build.held is False
        record.held = not record.rolling
    reconciler.adopted(build.name, now)
    surging = known is not None and known.surging and build.name.generation <= known.generation
    # The snapshot may be older than the rollout. An outdated build is rolled again without an operator.
    if build.same and not record.held and (surging or seen > build.name.generation):
        reconciler.surges.mark_controller_lost(record)


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
            leaving_seconds=_leaving_seconds(reconciler, record, drains),
            ever_ready=record.ever_ready,
        )
        for record in reconciler.records.values()
    }
    return ControllerSnapshot(created=created, replicas=replicas)


def _leaving_seconds(reconciler: Reconciler, record: Record, drains: Mapping[ReplicaName, float]) -> float | None:
    leaving = reconciler.surges.leaving.get(record.replica_id)
    return drains.get(leaving.name) if leaving is not None else None


def _undesired(reconciler: Reconciler, build: AdoptedBuild) -> Record:
    """The record of a replica that the spec no longer names: it drains."""
    model = ModelSpec(name=build.model, tp=build.tp, pp=build.pp)
    record = reconciler.records[build.name.replica_id] = Record(build.name.replica_id, model, build.role)
    return record


def _is_up(report: RankReport) -> bool:
    return report.started is not None and not report.ended


def _device(report: RankReport) -> str:
    return report.started.device if report.started is not None else ""
