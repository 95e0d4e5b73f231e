"""Which ranks of an earlier controller are adopted, and in which state. Pure.

rank reports, groups ─▶ plan_adoption   ─▶ builds to adopt; every other rank and placement group is ended by name
ControllerSnapshot   ─▶ restore_records ─▶ the records of a new reconciler, for adopted and for new builds

No build is ended because its ranks do not reply: a rank that does not is taken as the snapshot has it, and the health
judge decides. A build that may have come up after the snapshot is asked again.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from headrace_cluster.core.driver import AdoptedBuild, AdoptedState, RankFacts
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import ENDED, UP, RankReport, Stage
from headrace_cluster.core.reconciler import Reconciler
from headrace_cluster.core.record import Record, State
from headrace_cluster.core.snapshot import BuildSnapshot, ControllerSnapshot, ReplicaSnapshot
from headrace_cluster.errors import AdoptionError
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_proto.quantities import counted
from headrace_proto.role import Role

Reports = Mapping[tuple[ReplicaName, int], RankReport | None]  # None: the rank does not reply


@dataclass(frozen=True, slots=True)
class AdoptionPlan:
    """What is taken over, and what is ended by name."""

    state: AdoptedState
    ended_ranks: list[tuple[ReplicaName, int]]
    ended_groups: list[ReplicaName]


def plan_adoption(
    reports: Reports,
    groups: Collection[ReplicaName],
    expected: Mapping[str, bytes],
    secrets: Collection[bytes],
    snapshot: ControllerSnapshot | None,
) -> AdoptionPlan:
    """Adopts the builds that are up and ends the rest. groups: builds with a placement group; others: `choose_builds`.

    snapshot: of the last controller. A build of another secret or version beside builds of ours is left as it is.
    Raises AdoptionError.
    """
    # Ray ends ranks without a placement group.
    placed = {rank: report for rank, report in reports.items() if rank[0] in groups}
    recorded = snapshot.reports if snapshot is not None else {}
    foreign = find_foreign(placed, secrets)
    placed = {rank: report for rank, report in placed.items() if rank[0] not in foreign}
    builds = choose_builds(placed, expected, secrets, recorded)
    kept = {build.name for build in builds}
    adopted = {name.replica_id for name in kept}
    silent = [name for name in _silent(placed) if name.replica_id in expected.keys() - adopted]
    known = adopted | {name.replica_id for name in silent}
    starting = [name for name in _starting(placed, expected) if name.replica_id not in known]
    kept |= set(silent) | set(starting) | foreign.keys()
    found = sorted({name for name, _ in reports} | set(groups))
    return AdoptionPlan(
        AdoptedState(
            builds, {name.replica_id: name.generation for name in found}, silent, starting, list(foreign.values())
        ),
        [rank for rank in reports if rank[0] not in kept],
        [name for name in sorted(groups) if name not in kept],
    )


def find_foreign(reports: Reports, secrets: Collection[bytes]) -> dict[ReplicaName, str]:
    """The builds that are up and cannot be adopted, with the reason.

    Raises AdoptionError if all that are up are such builds: then this controller is the one with the wrong secret.
    """
    found: dict[ReplicaName, str] = {}
    names = sorted({name for name, _ in reports})
    up = {name: ranks for name in names if (ranks := _complete(reports, name)) and ranks[0].secrets}
    for name, ranks in up.items():
        if problem := _obstacle(name, ranks[0], secrets):
            found[name] = f"{problem}; build {name.generation} is left as it is, and not used"
    if found and found.keys() == up.keys():
        raise AdoptionError(_obstacle(name := next(iter(up)), up[name][0], secrets))
    return found


def _obstacle(name: ReplicaName, report: RankReport, secrets: Collection[bytes]) -> str:
    """Why a build with this report of its first rank cannot be adopted; empty if it can."""
    if not set(report.secrets) & set(secrets):
        return f"{name.replica_id} runs in this Ray with another secret: pass its file with --secret-file"
    if report.role not in set(Role):
        return f"{name.replica_id} has a role of another version of Headrace: {report.role[:40]!r}"
    return ""


def _complete(reports: Reports, name: ReplicaName) -> Sequence[RankReport]:
    """The reports of a build in the order of its ranks; empty unless all of them start or are up."""
    ranks = {rank: report for (build, rank), report in reports.items() if build == name}
    alive = [report for _, report in sorted(ranks.items()) if report is not None and report.stage not in ENDED]
    complete = bool(alive) and ranks.keys() == set(range(alive[0].tp * alive[0].pp)) and len(alive) == len(ranks)
    return alive if complete else []


def _silent(reports: Reports) -> list[ReplicaName]:
    """Of each replica the newest build that may be up: some ranks do not reply, and the others start or are up."""
    found: dict[str, ReplicaName] = {}
    for name in sorted({name for (name, _), report in reports.items() if report is None}):
        ranks = [report for (build, _), report in reports.items() if build == name]
        if all(report is None or report.stage not in ENDED for report in ranks):
            found[name.replica_id] = name
    return list(found.values())


def _starting(reports: Reports, expected: Mapping[str, bytes]) -> list[ReplicaName]:
    """Of each replica the newest build of which all ranks exist, as the spec describes it: it starts by itself."""
    found: dict[str, ReplicaName] = {}
    for name in sorted({name for name, _ in reports}):
        ranks = _complete(reports, name)
        if ranks and all(report.fingerprint == expected.get(name.replica_id) for report in ranks):
            found[name.replica_id] = name
    return list(found.values())


def choose_builds(
    reports: Reports,
    expected: Mapping[str, bytes],
    secrets: Collection[bytes],
    recorded: Mapping[tuple[ReplicaName, int], RankReport] | None = None,
) -> list[AdoptedBuild]:
    """Of each replica, the newest build of which all ranks exist and are up, and the one before if that is up, too.

    reports: of every rank that has not ended, by build and rank. recorded: of ranks that were up, by the last
    controller; of those that do not reply now these count. expected: the fingerprint of each replica of the spec.
    secrets: the fingerprints that this controller has. Raises AdoptionError when what serves would be ended by
    mistake.
    """
    _check_silence(reports, recorded or {})
    reports = {rank: _known(report, (recorded or {}).get(rank), secrets) for rank, report in reports.items()}
    found: dict[str, list[AdoptedBuild]] = {}
    for name in sorted({name for name, _ in reports}):  # the newest last
        up = _complete(reports, name)
        if not up or any(report.stage not in UP for report in up):
            continue
        started = up[0].started
        assert started is not None
        if problem := _obstacle(name, up[0], secrets):
            raise AdoptionError(problem)
        facts = [
            RankFacts(rank, report.pid, report.node, report.started.device if report.started is not None else "")
            for rank, report in enumerate(up)
        ]
        same = all(report.fingerprint == expected.get(name.replica_id) for report in up)
        build = AdoptedBuild(
            name,
            facts,
            started,
            Role(up[0].role),
            up[0].stage is Stage.DRAINING,
            up[0].held,
            up[0].model,
            up[0].tp,
            up[0].pp,
            same,
            role_number=up[0].role_number,
            reports=up,
        )
        found.setdefault(name.replica_id, []).append(build)
    return [build for builds in found.values() for build in _continuing(builds)]


def _known(report: RankReport | None, recorded: RankReport | None, secrets: Collection[bytes]) -> RankReport | None:
    """What is known of a rank. Its secrets may have been renewed since the record; it is of this cluster."""
    if report is not None or recorded is None:
        return report
    return msgspec.structs.replace(recorded, secrets=tuple(secrets))


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


def _check_silence(reports: Reports, recorded: Mapping[tuple[ReplicaName, int], RankReport]) -> None:
    """When many do not reply, this controller may be cut off. Those in the record are adopted whatever their number."""
    builds = {name for name, _ in reports}
    silent = {name for (name, _), report in reports.items() if report is None}
    unknown = {rank[0] for rank, report in reports.items() if report is None and rank not in recorded}
    all_silent = len(reports) > 1 and not any(reports.values())
    many_unknown = len(unknown) > 1 and 2 * len(unknown) >= len(builds)
    if unknown and (all_silent or many_unknown):
        found = f"{len(silent)} of {counted(len(builds), 'build')}"
        raise AdoptionError(f"{found} did not reply; nothing is ended, and they are asked again")


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
            record.rolling, record.role_number = known.rolling, known.role_number
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
    for name in adopted_state.silent:
        _forget_earlier(reconciler.records[name.replica_id], replicas.get(name.replica_id), name.generation)
        reconciler.silent(name, now)
    for name in adopted_state.starting:
        _forget_earlier(reconciler.records[name.replica_id], replicas.get(name.replica_id), name.generation)
        reconciler.starting(name, now)
    _keep_decoders(reconciler, replicas, adopted)
    return drains


def restore_late(reconciler: Reconciler, build: AdoptedBuild, now: float) -> None:
    """A build of `AdoptedState.silent` is up and continues."""
    _restore_current(reconciler, None, build, build.name.generation, now)


def _keep_decoders(reconciler: Reconciler, replicas: Mapping[str, ReplicaSnapshot], adopted: Collection[str]) -> None:
    """Of roles that leave a model without a replica that decodes, those of the record, else of the spec, are used."""
    recorded = {replica_id: Role(known.role) for replica_id, known in replicas.items()}
    desired = {replica.replica_id: replica.role for replica in reconciler.desired}
    for model in {record.model.name for record in reconciler.records.values()}:
        records = [record for record in reconciler.records.values() if record.model.name == model]
        up = [record for record in records if record.replica_id in adopted]
        if up and not any(record.role.decodes and not record.held for record in up):
            _use_roles(up, recorded)
        if not any(record.role.decodes for record in records):
            _use_roles(records, desired)


def _use_roles(records: Iterable[Record], roles: Mapping[str, Role]) -> None:
    for record in records:
        role = roles.get(record.replica_id, record.role)
        if record.role is not role:
            record.role, record.role_number = role, record.role_number + 1


def _restore_current(
    reconciler: Reconciler, known: ReplicaSnapshot | None, build: AdoptedBuild, seen: int, now: float
) -> None:
    """known: of the snapshot. seen: the newest generation in Ray."""
    record = reconciler.records.get(build.name.replica_id) or _undesired(reconciler, build)
    record.outdated = not build.same
    _forget_earlier(record, known, build.name.generation)
    # The rank may know a newer decision than the snapshot: an operator's last call may have come after it.
    if build.role_number is None or build.role_number >= record.role_number:
        record.role, record.role_number = build.role, build.role_number or record.role_number
    if build.draining and not (record.held or record.rolling):
        record.rolling = build.held is False
        record.held = not record.rolling
    reconciler.adopted(build.name, now)
    surging = known is not None and known.surging and build.name.generation <= known.generation
    # The snapshot may be older than the rollout. An outdated build is rolled again without an operator.
    if build.same and not record.held and (surging or seen > build.name.generation):
        reconciler.surges.mark_controller_lost(record)


def _forget_earlier(record: Record, known: ReplicaSnapshot | None, generation: int) -> None:
    """A drain or rollout of the snapshot was of an earlier build than the one of this generation."""
    if known is not None and known.generation < generation:
        record.held = record.rolling = False


def take_snapshot(
    reconciler: Reconciler,
    created: int,
    drains: Mapping[ReplicaName, float],
    reports: Mapping[ReplicaName, Sequence[RankReport]] | None = None,
) -> ControllerSnapshot:
    """The inverse of `restore_records`. drains: their remaining seconds. reports: of the ranks of each build."""
    replicas = {
        record.replica_id: ReplicaSnapshot(
            generation=record.generation,
            built=record.built,
            role=str(record.role),
            role_number=record.role_number,
            held=record.held,
            rolling=record.rolling,
            surging=reconciler.surges.following(record) is not None,
            drain_seconds=drains.get(record.name),
            leaving_seconds=_leaving_seconds(reconciler, record, drains),
            ever_ready=record.ever_ready,
        )
        for record in reconciler.records.values()
    }
    up = [record for record in reconciler.builds() if not record.down]
    builds = [_build_snapshot(record, reports[record.name]) for record in up if reports and reports.get(record.name)]
    return ControllerSnapshot(created=created, replicas=replicas, builds=builds)


def _build_snapshot(record: Record, reports: Sequence[RankReport]) -> BuildSnapshot:
    """With what may have changed after the ranks reported."""
    draining = record.state is State.DRAINING
    held = record.held if draining else None
    stage = Stage.DRAINING if draining else Stage.READY
    ranks = [msgspec.structs.replace(report, role=str(record.role), stage=stage, held=held) for report in reports]
    return BuildSnapshot(replica_id=record.replica_id, generation=record.generation, ranks=ranks)


def _leaving_seconds(reconciler: Reconciler, record: Record, drains: Mapping[ReplicaName, float]) -> float | None:
    leaving = reconciler.surges.leaving.get(record.replica_id)
    return drains.get(leaving.name) if leaving is not None else None


def _undesired(reconciler: Reconciler, build: AdoptedBuild) -> Record:
    """The record of a replica that the spec no longer names: it drains."""
    model = ModelSpec(name=build.model, tp=build.tp, pp=build.pp)
    record = reconciler.records[build.name.replica_id] = Record(build.name.replica_id, model, build.role)
    return record
