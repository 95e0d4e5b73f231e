"""Ray resources of an earlier controller: finds ranks and placement groups by name, adopts or ends them."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray

from headrace_cluster.core.adoption import choose_builds, plan_adoption
from headrace_cluster.core.driver import REPORT_SECONDS, REPORT_TRIES, RETRY_SECONDS, AdoptedBuild, AdoptedState
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import RankReport
from headrace_cluster.core.snapshot import ControllerSnapshot
from headrace_cluster.errors import AdoptionError
from headrace_cluster.ray import names as ray_names
from headrace_cluster.ray.calls import RayCalls
from headrace_cluster.ray.rank_group import RankGroup, RankPlace
from headrace_proto.quantities import counted


class RankEndedError(Exception):
    """Ray reports that a rank has ended."""


async def adopt(
    calls: RayCalls,
    cluster: str,
    expected: Mapping[str, bytes],
    secrets: Collection[bytes],
    snapshot: ControllerSnapshot | None,
) -> tuple[AdoptedState, list[RankGroup]]:
    """Takes over the builds that are up, and ends every other rank and placement group of the cluster.

    expected, secrets, snapshot: see `plan_adoption`. Raises AdoptionError, RayHangsError.
    """
    actors = await calls.run(ray_names.rank_actors, cluster)
    reports: dict[tuple[ReplicaName, int], RankReport | None] = dict.fromkeys(actors)

    async def ask(rank: tuple[ReplicaName, int]) -> None:
        try:
            reports[rank] = await _report(actors[rank])
        except RankEndedError:
            del reports[rank]

    for _ in range(REPORT_TRIES):
        await asyncio.gather(*(ask(rank) for rank, report in list(reports.items()) if report is None))
    groups = await calls.run(ray_names.groups, cluster)
    plan = plan_adoption(reports, groups, expected, secrets, snapshot)
    for name, rank in plan.ended_ranks:
        await calls.run(ray_names.kill_actor, name.rank(rank), cluster)
    for name in plan.ended_groups:
        await calls.run(ray_names.remove_group, name.group(cluster))
    names = [build.name for build in plan.state.builds] + plan.state.silent
    adopted = {name: RankGroup(name, cluster, _handles(name, actors)) for name in names}
    for build in plan.state.builds:
        replied = [reports[build.name, facts.rank] is not None for facts in build.ranks]
        _place(adopted[build.name], build, replied)
    return plan.state, list(adopted.values())


async def ask(group: RankGroup, expected: Mapping[str, bytes], secrets: Collection[bytes]) -> AdoptedBuild | None:
    """See `ReplicaDriver.report`. expected, secrets: see `plan_adoption`."""
    try:
        found = await asyncio.gather(*(_report(actor) for actor in group.actors))
    except RankEndedError:
        return None
    if silent := found.count(None):
        raise AdoptionError(f"{silent} of {counted(len(found), 'rank')} of {group.name.replica_id} do not reply")
    builds = choose_builds({(group.name, rank): report for rank, report in enumerate(found)}, expected, secrets)
    if not builds:
        return None
    _place(group, builds[0], [True] * len(found))
    return builds[0]


async def _report(actor: Any) -> RankReport | None:
    """None: it has not replied. Raises AdoptionError, RankEndedError."""
    try:
        async with asyncio.timeout(REPORT_SECONDS):
            return msgspec.msgpack.decode(await _reachable_report(actor), type=RankReport)
    except TimeoutError:
        return None
    except msgspec.ValidationError as error:
        raise AdoptionError(
            "ranks of another version of Headrace run in this Ray and cannot be taken over; stop them with that version"
        ) from error
    except ray.exceptions.RayActorError as error:
        raise RankEndedError from error
    except ray.exceptions.RayError:
        await asyncio.sleep(RETRY_SECONDS)
        return None


async def _reachable_report(actor: Any) -> bytes:
    """Repeated while the network fails: that is no evidence that the rank has ended."""
    while True:
        try:
            encoded: bytes = await actor.report.remote()
        except ray.exceptions.ActorUnavailableError:
            await asyncio.sleep(RETRY_SECONDS)
        else:
            return encoded


def _handles(name: ReplicaName, actors: Mapping[tuple[ReplicaName, int], Any]) -> list[Any]:
    return [actor for (build, _), actor in sorted(actors.items(), key=lambda item: item[0]) if build == name]


def _place(group: RankGroup, build: AdoptedBuild, replied: Sequence[bool]) -> None:
    """replied: which ranks are alive for certain. Of the others the process id may be another process's by now."""
    places = [
        RankPlace.of(report.pid, report.node, report.gpus) if alive else RankPlace(report.pid, report.node, report.gpus)
        for report, alive in zip(build.reports, replied, strict=True)
    ]
    log_path = next((report.log_path for report in build.reports if report.log_path), "")
    group.place(places, str(Path(log_path).parent) if log_path else "")
