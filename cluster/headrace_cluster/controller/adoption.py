"""Which of the ranks that an earlier controller left go on, and as what: pure.

ranks that answer ──▶ choose ──▶ builds to adopt; every other rank and place is ended by name
ControllerMemory ───▶ recall ──▶ the records of a fresh reconciler, builds of both kinds among them
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace_cluster.controller.driver import AdoptedBuild, Inheritance, RankFacts
from headrace_cluster.controller.memory import ControllerMemory, ReplicaMemory
from headrace_cluster.controller.reconciler import Reconciler
from headrace_cluster.naming import ReplicaName
from headrace_cluster.pools import Role
from headrace_cluster.rank_config import RankReport


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a build must be to stand for a replica of the spec."""

    ranks: int
    fingerprint: bytes  # of its config


def choose(
    reports: Mapping[tuple[ReplicaName, int], RankReport | None], wanted: Mapping[str, Wanted]
) -> list[AdoptedBuild]:
    """Of each wanted replica the newest build whose ranks are all there, up, and as wanted.

    reports: of every rank that exists, by build and rank; None of one that did not answer.
    """
    found: dict[str, AdoptedBuild] = {}
    for name in sorted({name for name, _ in reports}):  # the newest last
        want = wanted.get(name.replica_id)
        ranks = {rank: report for (build, rank), report in reports.items() if build == name}
        if want is None or ranks.keys() != set(range(want.ranks)):
            continue
        up = [report for _, report in sorted(ranks.items()) if report is not None and _fits(report, want)]
        if len(up) == want.ranks and (started := up[0].started) is not None:
            facts = [RankFacts(r, report.pid, report.node, _device(report)) for r, report in enumerate(up)]
            found[name.replica_id] = AdoptedBuild(name, facts, started, Role(up[0].role), up[0].draining)
    return list(found.values())


def recall(
    reconciler: Reconciler, memory: ControllerMemory | None, inheritance: Inheritance, now: float
) -> dict[ReplicaName, float]:
    """Brings a fresh reconciler to where the last one was; seconds that are left of drains, by build."""
    remembered = memory.replicas if memory is not None else {}
    drains: dict[ReplicaName, float] = {}
    for record in reconciler.records.values():
        known = remembered.get(record.replica_id)
        if known is not None:
            record.role, record.held, record.ever_ready = Role(known.role), known.held, known.ever_ready
            record.generation = known.generation
            if known.drain_seconds is not None:
                drains[record.name] = known.drain_seconds
        record.generation = max(record.generation, inheritance.generations.get(record.replica_id, 0))
    for build in inheritance.builds:
        record = reconciler.records[build.name.replica_id]
        # The rank's own word is the newer one: an operator's last order may have missed the last View.
        record.role, record.held = build.role, record.held or build.draining
        reconciler.adopted(build.name, now)
    return drains


def remember(reconciler: Reconciler, created: int, drains: Mapping[ReplicaName, float]) -> ControllerMemory:
    """The other end of `recall`. drains: what is left of them, in seconds."""
    replicas = {
        record.replica_id: ReplicaMemory(
            generation=record.generation,
            role=str(record.role),
            held=record.held,
            drain_seconds=drains.get(record.name),
            ever_ready=record.ever_ready,
        )
        for record in reconciler.records.values()
    }
    return ControllerMemory(created=created, replicas=replicas)


def _fits(report: RankReport, want: Wanted) -> bool:
    return report.started is not None and not report.ended and report.fingerprint == want.fingerprint


def _device(report: RankReport) -> str:
    return report.started.device if report.started is not None else ""
